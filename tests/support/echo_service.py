"""A gRPC service of bytes with one method of each kind, whose handlers are the test's own."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.rpc.channel import open_channel
from common.rpc.server import WorkerServer

SERVICE = "twostroke.test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

_HANDLERS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
Handler = Callable[[Any, Any], Any]


def add_echo(server: WorkerServer, **handlers: Handler) -> None:
    """`handlers` by kind; the method has the kind's name."""
    methods = {kind: _HANDLERS[kind](handler) for kind, handler in handlers.items()}
    server.grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


@asynccontextmanager
async def running_echo(**handlers: Handler) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with these handlers."""
    server = WorkerServer("127.0.0.1:0", (SERVICE,))
    add_echo(server, **handlers)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop(0.0)


async def call(channel: grpc.aio.Channel, kind: str, *requests: bytes) -> list[bytes]:
    """All responses of one call. Streams of requests are async iterators, as the services send them."""
    method = getattr(channel, kind)(f"/{SERVICE}/{kind}")

    async def stream() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    outgoing = stream() if kind.startswith("stream") else requests[0]
    if kind.endswith("unary"):
        return [await method(outgoing)]
    return [response async for response in method(outgoing)]
