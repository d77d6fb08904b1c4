"""A worker's gRPC server: address, health, and an orderly end. The services themselves are the worker's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError, TwostrokeError
from common.rpc.address import is_loopback
from common.rpc.handlers import HandlerInterceptor
from common.rpc.limits import SERVER_OPTIONS
from common.rpc.tls import TlsIdentity
from common.stop_signals import stop_signals

log = logging.getLogger("twostroke.rpc")

MAX_PORT = 65_535
LAST_WORDS_S = 1.0
"""After the drain, how long handlers may take to write their last message."""


class WorkerServer:
    """Add servicers to `grpc_server`, `start()`, then `serve_until_stopped()`."""

    def __init__(
        self,
        address: str,
        service_names: Sequence[str] = (),
        *,
        tls: TlsIdentity | None = None,
        allow_unencrypted: bool = False,
        health_address: str | None = None,
    ) -> None:
        """`address` is `host:port`; port 0 takes any free one. Raises ConfigError when the port is in use, or when
        other machines would reach it unencrypted and `allow_unencrypted` does not say that they may.

        `service_names` (such as `twostroke.v1.Decode`) get a health status of their own beside the server's.
        `health_address` serves health alone, as plain text: Kubernetes' probes speak no TLS.
        """
        if tls is None and not allow_unencrypted:
            _refuse_other_machines(address)
        self.grpc_server = grpc.aio.server(interceptors=(HandlerInterceptor(),), options=SERVER_OPTIONS)
        self.address = _bind(self.grpc_server, address, tls)
        self._servers = [self.grpc_server]
        self.health_address: str | None = None
        if health_address is not None:
            self._servers.append(grpc.aio.server(options=SERVER_OPTIONS))
            self.health_address = _bind(self._servers[-1], health_address, None)
        self._health = cast(Any, health).aio.HealthServicer()
        self._service_names = ("", *service_names)
        for server in self._servers:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._drain_requested = asyncio.Event()

    async def start(self, *, is_serving: bool = True) -> None:
        await self.set_serving(is_serving)
        for server in self._servers:
            await server.start()

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
        """Returns after SIGTERM, SIGINT or `request_drain`, and an orderly end: NOT_SERVING, `drain` for up to
        `grace_s`, stop.

        A second signal cuts the drain short. When one of `must_run` ends first, the server stops at once and its
        exception is raised: a worker without its engine must not look alive.
        """
        with stop_signals() as signals:
            failed = await _first_of((signals.get(), self._drain_requested.wait()), must_run)
            if failed is None:
                await self._drain(drain, grace_s, signals)
        await self.stop(LAST_WORDS_S if failed is None else 0.0)
        if failed is not None:
            failed.result()
            raise TwostrokeError("a background task of this worker ended by itself; its log may say why")

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` for those in flight, then cancels them."""
        await self._health.enter_graceful_shutdown()
        for server in self._servers:
            await server.stop(grace_s)

    def request_drain(self) -> None:
        """The same as SIGTERM, but for a signal that follows: that one is the first. Idempotent."""
        self._drain_requested.set()

    async def _drain(self, drain: Callable[[], Awaitable[None]], grace_s: float, signals: "asyncio.Queue[str]") -> None:
        log.info("draining for up to %g s", grace_s)
        await self._health.enter_graceful_shutdown()
        draining = asyncio.ensure_future(_run(drain))
        impatience = asyncio.ensure_future(_nth(signals, 2 if self._drain_requested.is_set() else 1))
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


async def _nth(signals: "asyncio.Queue[str]", count: int) -> None:
    for _ in range(count):
        await signals.get()


async def _first_of(
    reasons_to_stop: Iterable[Awaitable[object]], must_run: "Iterable[asyncio.Future[None]]"
) -> "asyncio.Future[None] | None":
    """None after a reason to stop, else the future that ended."""
    reasons = [asyncio.ensure_future(reason) for reason in reasons_to_stop]
    futures = tuple(must_run)
    everything: set[asyncio.Future[Any]] = {*reasons, *futures}
    await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    is_stopped = any(reason.done() for reason in reasons)
    for reason in reasons:
        reason.cancel()
    ended = next((future for future in futures if future.done()), None)
    return None if is_stopped else ended


def _refuse_other_machines(address: str) -> None:
    host = address.rpartition(":")[0]
    if host and not is_loopback(host):
        raise ConfigError(
            f"{address} is reached by other machines, and nothing there would be encrypted: name a folder with "
            "certificates (--tls-dir), listen on 127.0.0.1, or allow it where the network is trusted "
            "(--allow-unencrypted)"
        )


def _bind(server: grpc.aio.Server, address: str, tls: TlsIdentity | None) -> str:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"address is {address!r}; it must be host:port, such as 127.0.0.1:50051 (port 0: any free)")
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: port {port} is in use or the host is not this machine's ({error}); "
            "stop the process that holds it, or choose another port"
        ) from None
    return f"{host}:{bound}"
