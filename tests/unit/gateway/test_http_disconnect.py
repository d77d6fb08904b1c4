"""A client that leaves ends everything that was done for it, at once."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from common.sampling import FinishReason
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import FakeDispatcher, Step, tokens_of
from tests.support.gateway_app import TestGateway
from tests.support.tiny_tokenizers import MODEL_NAME


class Client:
    """One HTTP request to an ASGI app, whose other end can leave at any moment."""

    def __init__(self, gateway: TestGateway, path: str, body: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sent = asyncio.Event()
        self.blocks_sends = False
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._received = 0
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        self.request = asyncio.create_task(gateway.app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        self._received += 1
        if self._received == 1:
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        self.sent.set()
        if self.blocks_sends:
            await asyncio.Event().wait()


def waits_for_ever(_: Generation) -> list[Step]:
    return [asyncio.Event()]


def waits_after_a_token(_: Generation) -> list[Step]:
    return [TokenDelta(tokens_of([20])), asyncio.Event(), TokenDelta((), FinishReason.LENGTH)]


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "hi"} | fields


def num_open(expected: int) -> Callable[[FakeDispatcher], bool]:
    return lambda dispatcher: dispatcher.num_open == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 5])
async def test_before_the_first_token(stream: bool, n: int) -> None:
    gateway = TestGateway(waits_for_ever)
    client = Client(gateway, "/v1/completions", completion(stream=stream, n=n))
    await gateway.dispatcher.until(num_open(n))
    client.leave()
    await client.request
    assert gateway.dispatcher.num_open == 0
    assert len(gateway.dispatcher.closed_early) == n
    assert client.messages == []


@pytest.mark.parametrize("n", [1, 3])
async def test_in_the_middle_of_a_stream(n: int) -> None:
    gateway = TestGateway(waits_after_a_token)
    client = Client(gateway, "/v1/completions", completion(stream=True, n=n))
    await client.sent.wait()
    client.leave()
    await client.request
    assert gateway.dispatcher.num_open == 0
    assert client.messages[0]["status"] == 200
    assert all(message.get("more_body", True) for message in client.messages), "nobody is there to be told"


async def test_while_the_client_does_not_read() -> None:
    """The connection is full, so the surface waits in `send`, not for tokens."""
    gateway = TestGateway(waits_after_a_token)
    client = Client(gateway, "/v1/completions", completion(stream=True))
    client.blocks_sends = True
    await client.sent.wait()
    client.leave()
    await client.request
    assert gateway.dispatcher.num_open == 0


async def test_in_the_middle_of_a_whole_answer() -> None:
    gateway = TestGateway(waits_after_a_token)
    client = Client(gateway, "/v1/completions", completion())
    await gateway.dispatcher.until(num_open(1))
    client.leave()
    await client.request
    assert gateway.dispatcher.num_open == 0
    assert gateway.dispatcher.closed_early


async def test_a_request_that_is_cancelled_with_the_server() -> None:
    gateway = TestGateway(waits_for_ever)
    client = Client(gateway, "/v1/completions", completion(n=3, stream=True))
    await gateway.dispatcher.until(num_open(3))
    client.request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.request
    assert gateway.dispatcher.num_open == 0


async def test_it_is_counted_as_499() -> None:
    gateway = TestGateway(waits_after_a_token)
    for stream in (False, True):
        client = Client(gateway, "/v1/completions", completion(stream=stream))
        await gateway.dispatcher.until(num_open(1))
        client.leave()
        await client.request
    labels = {"route": "/v1/completions", "status": "499"}
    assert gateway.registry.get_sample_value("twostroke_requests_total", labels) == 2
    assert gateway.registry.get_sample_value("twostroke_active_requests") == 0
    (span, _) = [span for span in gateway.spans.get_finished_spans() if span.name == "gateway.request"]
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 499


async def test_before_the_request_was_whole() -> None:
    gateway = TestGateway()
    client = Client(gateway, "/v1/completions", completion())
    client._received = 1  # the body never comes
    client.leave()
    await client.request
    assert not gateway.dispatcher.generations
