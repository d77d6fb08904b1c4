"""What failures of the other half become: a status before the first token, an event after it."""

import asyncio
import json

import httpx
import pytest

from common.errors import Draining, NoRoom, NoWorker, NumericFailure, PeerLost, TwostrokeError
from common.sampling import FinishReason
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import Step, tokens_of
from tests.support.gateway_app import TestGateway, events_of


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (NoRoom("no room", retry_after_s=2.4), 429, "rate_limit_error", "3"),
        (NoRoom("no room"), 429, "rate_limit_error", "1"),
        (NoWorker("nobody"), 503, "server_error", "1"),
        (Draining("leaving", retry_after_s=0.1), 503, "server_error", "1"),
        (PeerLost("gone"), 502, "server_error", None),
        (NumericFailure("NaN"), 500, "server_error", None),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(
    error: TwostrokeError, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    gateway = TestGateway(lambda _: [error])
    response = await gateway.complete(stream=stream)
    assert response.status_code == status
    assert response.json() == {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert gateway.dispatcher.num_open == 0


def breaks(_: Generation) -> list[Step]:
    return [TokenDelta(tokens_of([20])), PeerLost("decode-0 is gone")]


async def test_an_error_after_the_first_token_is_an_event_without_done() -> None:
    response = await TestGateway(breaks).chat(stream=True)
    assert response.status_code == 200
    *_, last = events_of(response)
    assert json.loads(last)["error"]["code"] == "peer_lost"
    assert "[DONE]" not in response.text


async def test_an_error_after_the_first_token_of_a_whole_answer_is_a_status() -> None:
    assert (await TestGateway(breaks).chat()).status_code == 502


async def test_a_stream_that_ends_without_a_reason_is_an_error() -> None:
    response = await TestGateway(lambda _: [TokenDelta(tokens_of([20]))]).complete()
    assert response.status_code == 502
    assert "finish reason" in response.json()["error"]["message"]


async def test_one_choice_that_fails_ends_the_others() -> None:
    never = asyncio.Event()

    def script(generation: Generation) -> list[Step]:
        if generation.request_id.endswith("-2"):
            return [NoRoom("no room for the third")]
        return [never, TokenDelta(tokens_of([20]), FinishReason.LENGTH)]

    gateway = TestGateway(script)
    for stream in (False, True):
        response = await gateway.complete(n=4, stream=stream)
        assert response.status_code == 429
        assert gateway.dispatcher.num_open == 0


async def test_an_error_of_ours_is_a_500_that_tells_nothing() -> None:
    def script(_: Generation) -> list[Step]:
        raise KeyError("secret detail")

    gateway = TestGateway(script)
    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.post("/v1/completions", json={"model": "tiny-model", "prompt": "hi"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_no_model_yet_is_503_everywhere_but_healthz() -> None:
    gateway = TestGateway(knows_model=False)
    for response in (await gateway.complete(), await gateway.chat()):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert response.headers["retry-after"] == "1"
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200


async def test_readiness_tells_its_reason() -> None:
    gateway = TestGateway(not_ready="no decode worker is ready")
    async with gateway.client() as client:
        response = await client.get("/readyz")
        assert (response.status_code, response.json()["reason"]) == (503, "no decode worker is ready")
        gateway.not_ready = None
        assert (await client.get("/readyz")).status_code == 200


async def test_api_keys_name_the_tenant() -> None:
    gateway = TestGateway(tenants_by_api_key={"sk-1": "acme", "sk-2": "globex"})
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sk-1"}, {"authorization": "Bearer "}):
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await gateway.post(path, b"{", headers)
            assert response.status_code == 401, "before the body is looked at"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "wrong" not in response.text
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": "Bearer sk-1"})).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
    await gateway.complete({"authorization": "bearer sk-2"})
    assert gateway.dispatcher.generations[-1].tenant == "globex"


async def test_headers_tell_the_way() -> None:
    gateway = TestGateway()
    gateway.dispatcher.route.fallback = "prefill_lost"
    gateway.dispatcher.route.decode_worker = "décode\r\nx: y"
    for stream in (False, True):
        headers = (await gateway.chat(stream=stream)).headers
        assert headers["x-twostroke-prefill-worker"] == "prefill-0"
        assert headers["x-twostroke-decode-worker"] == "d?code??x: y"
        assert headers["x-twostroke-placement"] == "least_load"
        assert headers["x-twostroke-fallback"] == "prefill_lost"
    gateway.dispatcher.route.fallback = ""
    assert "x-twostroke-fallback" not in (await gateway.chat()).headers
