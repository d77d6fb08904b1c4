"""Clients that stop reading or writing, against the real HTTP server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

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


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's body, once it is whole."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(app: Any, client_timeout_s: float) -> AsyncIterator[tuple[str, int]]:
    bound = bind("127.0.0.1", 0, client_timeout_s)
    bound.listen()
    server = HttpServer(app, client_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield bound.getsockname()
    finally:
        server.should_exit = True
        await serving
        bound.close()


async def test_a_client_that_never_reads_is_gone_after_the_time_out() -> None:
    """Bytes wait in the kernel up to its limits, in the gateway up to one write; then the connection is dropped."""
    app = EndlessApp()
    async with served(app, 0.2) as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(client.connect, address)
            client.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await app.left.wait()
        assert app.num_bytes > 0


HEAD = b"POST / HTTP/1.1\r\nHost: gateway\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"POST / HT", HEAD[:-2], HEAD, HEAD + b"wor", HEAD + b"word" + HEAD[:9], HEAD + b"word" + HEAD]
)
async def test_a_request_that_does_not_go_on_costs_its_connection(sent: bytes) -> None:
    async with served(echo, 0.1) as address, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        answered = await reader.read()  # until the server closes
        assert answered.endswith(b"\r\n\r\nword") == (b"word" in sent)
        writer.close()


async def test_an_idle_connection_stays_for_the_next_request() -> None:
    """For longer than a silent one is kept: one that is opened after the first answer is closed before the second."""
    async with served(echo, 0.1) as address, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(HEAD + b"wo")
            writer.write(b"rd")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == b"word"
            silent, silent_writer = await asyncio.open_connection(*address)
            assert await silent.read() == b""
            silent_writer.close()
        writer.close()
