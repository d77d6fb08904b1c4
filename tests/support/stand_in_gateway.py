"""An HTTP server in the gateway's place: one model, and one streamed answer to every chat completion."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RESPONSE_ID = "chatcmpl-stand-in"


class StandInGateway(http.server.ThreadingHTTPServer):
    """`bodies` are the chat completions that were asked for."""

    def __init__(self, pieces: tuple[str, ...], num_tokens: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces = pieces
        self.num_tokens = num_tokens
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stand_in_gateway(*pieces: str, num_tokens: int | None = None) -> Iterator[StandInGateway]:
    server = StandInGateway(pieces, len(pieces) if num_tokens is None else num_tokens)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StandInGateway

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": "small"}]}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        events = [*(_event(piece) for piece in self.server.pieces), _event(None, finish_reason="stop")]
        usage = {"completion_tokens": self.server.num_tokens}
        events.append({"id": RESPONSE_ID, "model": "small", "choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

    def _send(self, content_type: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, template: str, *args: object) -> None:
        """Silence: what was asked is in `bodies`."""


def _event(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {
        "id": RESPONSE_ID,
        "model": "small",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
