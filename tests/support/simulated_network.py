"""Hosts and calls without a network: what gRPC does for its callers, in one event loop, with faults and deaths.

A channel looks like a `grpc.aio.Channel` to the generated stubs. A call runs its handler in a task of its own; errors
of `common.errors` arrive as the statuses that gRPC would carry, and the calls of a host that dies end as lost ones do.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from grpc.aio import Metadata

from common.errors import TwostrokeError
from common.faults.injector import Injector
from common.rpc.faulty import SENT, faulty_stream, with_faults
from common.rpc.status import ERROR_KEY, RETRY_AFTER_KEY

MAX_QUEUED = 4
"""Messages on their way in one direction of a call: flow control."""


class Host:
    """One incarnation of a process at an address. The generated `add_..._to_server` take it for a server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.handlers: dict[str, Callable[[Any, Any], Any]] = {}  # by the call's path
        self.is_alive = True
        self.calls: set[Call] = set()  # that it answers or has made
        self.defects: list[BaseException] = []

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """The same handlers, in another form."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            behaviors = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
            self.handlers[f"/{service}/{name}"] = next(behavior for behavior in behaviors if behavior is not None)


class Network:
    def __init__(self, injector: Injector) -> None:
        self.hosts: dict[str, Host] = {}
        self.injector = injector

    def channel(self, address: str, owner: Host) -> "Channel":
        return Channel(self, address, owner)

    def die(self, host: Host) -> None:
        """Its calls are cut on both ends, and nobody reaches it nor hears of it any more."""
        host.is_alive = False
        del self.hosts[host.address]
        for call in list(host.calls):
            call.cut()

    def reach(self, address: str, owner: Host) -> Host:
        host = self.hosts.get(address)
        if host is None or not owner.is_alive:
            raise lost(f"{address} cannot be reached")
        return host


class Channel:
    def __init__(self, network: Network, address: str, owner: Host) -> None:
        self._network = network
        self._address = address
        self._owner = owner

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        return partial(self._unary, method)

    def unary_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        return partial(Call, self._network, self._address, self._owner, method)

    stream_stream = stream_unary = unary_stream

    async def close(self, grace: float | None = None) -> None:
        """Calls end with their callers here."""

    async def _unary(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the name is gRPC's)
        wait_for_ready: bool = False,
    ) -> Any:
        call = Call(self._network, self._address, self._owner, method, request)
        try:
            async with asyncio.timeout(timeout):
                return await anext(call)
        except TimeoutError:
            raise status(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded") from None
        finally:
            call.cancel()


class Call:
    """Iterated by the caller. Ends with the handler, with `cancel`, or with either host."""

    def __init__(self, network: Network, address: str, owner: Host, method: str, request: Any, **_: Any) -> None:
        self._network = network
        self._method = method
        self._owner = owner
        self._answers: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED)
        self._end: BaseException | None = None
        self._has_ended = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._serve(address, request))

    @property
    def is_watch(self) -> bool:
        """Whether it is a status stream, which never ends."""
        return self._method.endswith("/WatchStatus")

    async def initial_metadata(self) -> None:
        """Headers come at once here."""

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        if self._answers.empty() and self._end is None:
            await self._next_or_end()
        if not self._answers.empty():
            return self._answers.get_nowait()
        assert self._end is not None
        raise self._end

    def cancel(self) -> bool:
        """By the caller: the handler is cancelled."""
        self._finish(asyncio.CancelledError())
        return self._task.cancel()

    def cut(self) -> None:
        """By the death of either host. What was answered before may still be read."""
        self._finish(lost("the connection was cut"))
        self._task.cancel()

    async def _next_or_end(self) -> None:
        answer, end = asyncio.ensure_future(self._answers.get()), asyncio.ensure_future(self._has_ended.wait())
        try:
            await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancel()  # as gRPC does with a reader that is cancelled
            raise
        finally:
            end.cancel()
            answer.cancel()
        if answer.done() and not answer.cancelled():
            self._answers._queue.appendleft(answer.result())  # type: ignore[attr-defined]  # where it came from

    def _finish(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            self._has_ended.set()

    async def _serve(self, address: str, request: Any) -> None:
        try:
            host = self._network.reach(address, self._owner)
        except grpc.aio.AioRpcError as error:
            self._finish(error)
            return
        calls = (host.calls, self._owner.calls)
        for side in calls:
            side.add(self)
        try:
            await self._handle(host, request)
            self._finish(StopAsyncIteration())
        except TwostrokeError as error:
            self._finish(reported(error))
        except grpc.aio.AioRpcError as error:
            self._finish(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, the caller hears of it and the test sees it)
            host.defects.append(error)
            self._finish(status(grpc.StatusCode.INTERNAL, repr(error)))
        finally:
            if self._pump is not None:
                self._pump.cancel()
            for side in calls:
                side.discard(self)

    async def _handle(self, host: Host, request: Any) -> None:
        behavior = with_faults(host.handlers[self._method], self._method, self._network.injector)
        requests = self._pumped(request) if hasattr(request, "__aiter__") else request
        if not inspect.isasyncgenfunction(behavior):
            await self._answers.put(await behavior(requests, _Context()))
            return
        async with aclosing(behavior(requests, _Context())) as answers:
            async for answer in answers:
                await self._answers.put(answer)

    def _pumped(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The caller's requests, read by a task of the caller's side."""
        if self._method in SENT:
            requests = faulty_stream(requests, SENT[self._method], self._network.injector)
        queue: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED)
        last = object()

        async def pump() -> None:
            async for request in requests:
                await queue.put(request)
            await queue.put(last)

        async def received() -> AsyncIterator[Any]:
            while (request := await queue.get()) is not last:
                yield request

        self._pump = asyncio.get_running_loop().create_task(pump())
        return received()


class _Context:
    async def abort(self, code: grpc.StatusCode, details: str, _: Any = ()) -> None:
        raise status(code, details)


def status(code: grpc.StatusCode, details: str, trailing: Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), trailing or Metadata(), details)


def lost(details: str) -> grpc.aio.AioRpcError:
    return status(grpc.StatusCode.UNAVAILABLE, details)


def reported(error: TwostrokeError) -> grpc.aio.AioRpcError:
    trailing = Metadata((ERROR_KEY, type(error).__name__))
    if error.retry_after_s is not None:
        trailing.add(RETRY_AFTER_KEY, repr(error.retry_after_s))
    return status(grpc.StatusCode[error.grpc_status], error.message, trailing)
