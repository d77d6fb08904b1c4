"""A worker's gRPC server: address, health, and an orderly end. The services themselves are the worker's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError, TwostrokeError
from common.rpc.handlers import HandlerInterceptor
from common.rpc.limits import SERVER_OPTIONS
from common.stop_signals import stop_signals

log = logging.getLogger("twostroke.rpc")

MAX_PORT = 65_535
LAST_WORDS_S = 1.0
"""After the drain, how long handlers may take to write their last message."""


class WorkerServer:
    """Add servicers to `grpc_server`, `start()`, then `serve_until_stopped()`."""

    def __init__(self, address: str, service_names: Sequence[str] = ()) -> None:
        """`address` is `host:port`; port 0 takes any free one. Raises ConfigError when the port is in use.

        `service_names` (such as `twostroke.v1.Decode`) get a health status of their own beside the server's.
        """
        self.grpc_server = grpc.aio.server(interceptors=(HandlerInterceptor(),), options=SERVER_OPTIONS)
        self.address = _bind(self.grpc_server, address)
        self._health = cast(Any, health).aio.HealthServicer()
        self._service_names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)

    async def start(self, *, is_serving: bool = True) -> None:
        await self.set_serving(is_serving)
        await self.grpc_server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers for the server and for each of its services."""
        statuses = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)

    async def serve_until_stopped(
        self,
        drain: Callable[[], Awaitable[None]],
        grace_s: float,
        must_run: "Iterable[asyncio.Future[None]]" = (),
    ) -> None:
        """Returns after SIGTERM or SIGINT and an orderly end: NOT_SERVING, `drain` for up to `grace_s`, stop.

        A second signal cuts the drain short. When one of `must_run` ends first, the server stops at once and its
        exception is raised: a worker without its engine must not look alive.
        """
        with stop_signals() as signals:
            failed = await _first_of(signals.get(), must_run)
            if failed is None:
                await self._drain(drain, grace_s, signals)
        await self.stop(LAST_WORDS_S if failed is None else 0.0)
        if failed is not None:
            failed.result()
            raise TwostrokeError("a background task of this worker ended by itself; its log may say why")

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` for those in flight, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)

    async def _drain(self, drain: Callable[[], Awaitable[None]], grace_s: float, signals: "asyncio.Queue[str]") -> None:
        log.info("draining for up to %g s", grace_s)
        await self._health.enter_graceful_shutdown()
        draining = asyncio.ensure_future(_run(drain))
        impatience = asyncio.ensure_future(signals.get())
        await asyncio.wait({draining, impatience}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        if not draining.done():
            log.warning("not drained after %g s or a second signal; what is left will be cancelled", grace_s)
            draining.cancel()
        results = await asyncio.gather(draining, impatience, return_exceptions=True)
        if isinstance(results[0], Exception):
            log.error("drain failed", exc_info=results[0])


async def _run(drain: Callable[[], Awaitable[None]]) -> None:
    await drain()


async def _first_of(
    signal_received: Awaitable[str], must_run: "Iterable[asyncio.Future[None]]"
) -> "asyncio.Future[None] | None":
    """None after a signal, else the future that ended."""
    stopped = asyncio.ensure_future(signal_received)
    futures = tuple(must_run)
    everything: set[asyncio.Future[Any]] = {stopped, *futures}
    await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    ended = next((future for future in futures if future.done()), None)
    if ended is not None and not stopped.done():
        stopped.cancel()
        return ended
    return None


def _bind(server: grpc.aio.Server, address: str) -> str:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"address is {address!r}; it must be host:port, such as 127.0.0.1:50051 (port 0: any free)")
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: port {port} is in use or the host is not this machine's ({error}); "
            "stop the process that holds it, or choose another port"
        ) from None
    return f"{host}:{bound}"
