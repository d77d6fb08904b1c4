"""Clients that stop reading, against the real HTTP server."""

import asyncio
import socket
from typing import Any

from gateway.answer import run_until_disconnect
from gateway.http_server import HttpServer, bind

PATIENCE_S = 30.0


class EndlessApp:
    """Answers with bytes without end; says how many it sent and when the client was found to have left."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        if not await run_until_disconnect(receive, self._send(send)):
            self.left.set()

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
            self.num_bytes += 65_536
            await asyncio.sleep(0)  # a connection that is lost takes everything at once


async def test_a_client_that_never_reads_is_gone_after_the_time_out() -> None:
    """Bytes wait in the kernel up to its limits, in the gateway up to one write; then the connection is dropped."""
    app = EndlessApp()
    bound = bind("127.0.0.1", 0, 0.2)
    bound.listen()
    server = HttpServer(app)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(client.connect, bound.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await app.left.wait()
        assert app.num_bytes > 0
    finally:
        server.should_exit = True
        await serving
