"""`python -m bench.hand_off.sink`: a gRPC server that takes raw bytes and drops them; it says its address on one line.

What the hand-off is compared with: no checksum, no message to parse, no pool to write to, one answer at the end.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from common.rpc.limits import SERVER_OPTIONS

SERVICE = "bench.Sink"
METHOD = "Take"


async def _take(messages: AsyncIterator[bytes], _: object) -> bytes:
    """How many bytes came, in decimal."""
    num_bytes = 0
    async for message in messages:
        num_bytes += len(message)
    return str(num_bytes).encode()


async def _serve() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.stream_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
