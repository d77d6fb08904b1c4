from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from cli.errors import CommandError
from cli.served import ServedModel, fetch_model
from tests.support.stack_process import free_port


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"data": [{"id": "tiny", "numerics": "reference", "exact": false, "inexact_reason": "it rounds"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


async def test_the_name_and_the_promise_are_those_that_the_gateway_tells() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Models)
    Thread(target=server.handle_request, daemon=True).start()
    served = await fetch_model(f"http://127.0.0.1:{server.server_port}")
    server.server_close()
    assert served == ServedModel("tiny", "reference", False, "it rounds")
    assert served.exactness == "exact: false (it rounds); --numerics int8 is exact on CPUs"


def test_an_exact_path_says_so() -> None:
    assert ServedModel("tiny", "int8", True, "").exactness == "exact: one request, one answer"


async def test_no_gateway_is_one_clear_error() -> None:
    with pytest.raises(CommandError, match="/v1/models"):
        await fetch_model(f"http://127.0.0.1:{free_port()}")
