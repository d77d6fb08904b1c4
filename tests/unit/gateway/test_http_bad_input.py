"""Bodies that are no JSON, too long or beyond the model, and paths that are not there: a 4xx in OpenAI's shape."""

import json
from typing import Any

import pytest

from gateway.app import GatewayLimits
from tests.support.gateway_app import TestGateway, assert_refused, prompt_json
from tests.support.tiny_tokenizers import MAX_MODEL_LEN, MODEL_NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"", ["not JSON"]),
        (b"{", ["not JSON", "line 1"]),
        (b'{"model": "m",}', ["not JSON"]),
        (b"[]", ["array", "object"]),
        (b"null", ["null"]),
        (b'"text"', ["string"]),
        (b"7", ["number"]),
        (b'{"model": "\xff"}', ["not UTF-8", "0xff"]),
        (b"\xef\xbb\xbf{}", ["not JSON"]),
        (b'{"temperature": NaN}', ["NaN"]),
        (b'{"temperature": -Infinity}', ["-Infinity"]),
        (b'{"temperature": 1e400}', ["1e400"]),
        (b'{"seed": 18446744073709551616}', ["18446744073709551616", "64 bits"]),
        (b'{"seed": -9223372036854775809}', ["64 bits"]),
        (b'{"seed": ' + b"9" * 100_000 + b"}", ["64 bits"]),
        (b'{"prompt": ' + b"[" * 200_000 + b"}", ["nested too deeply"]),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, ["nested too deeply"]),
    ],
)
async def test_what_is_no_json_object(body: bytes, parts: list[str]) -> None:
    gateway = TestGateway()
    for path in (COMPLETIONS, CHAT):
        assert_refused(await gateway.post(path, body), 400, "invalid_value", None, *parts)
    assert not gateway.dispatcher.generations


async def test_a_name_that_comes_twice_is_refused() -> None:
    body = b'{"model": "tiny-model", "prompt": "hi", "seed": 1, "seed": 2}'
    assert_refused(await TestGateway().post(COMPLETIONS, body), 400, "invalid_value", "seed", "'seed' twice")


async def test_prompts_that_are_too_long_are_refused_with_both_numbers() -> None:
    gateway = TestGateway()
    for stream in (False, True):
        response = await gateway.complete(prompt=[5] * MAX_MODEL_LEN, stream=stream)
        assert_refused(response, 400, "context_length_exceeded", None, f"{MAX_MODEL_LEN} tokens", "at most 255")
    long_text = "word " * 600  # long enough to be tokenized in a thread
    assert_refused(await gateway.complete(prompt=long_text), 400, "context_length_exceeded", None, "256")
    response = await gateway.chat(messages=[{"role": "user", "content": long_text}])
    assert_refused(response, 400, "context_length_exceeded", None, "256")
    assert not gateway.dispatcher.generations


async def test_more_output_than_fits_is_refused_when_it_was_asked_for() -> None:
    gateway = TestGateway()
    response = await gateway.complete(prompt=[5] * 200, max_tokens=57)
    assert_refused(response, 400, "context_length_exceeded", "max_tokens", "200", "57", "257", "256")
    assert (await gateway.complete(prompt=[5] * 200, max_tokens=56)).status_code == 200
    assert (await gateway.complete(prompt=[5] * 250)).status_code == 200
    assert gateway.dispatcher.generations[-1].sampling.max_tokens == 6  # the default of 16, as far as it fits


async def test_too_many_choices_in_all_are_refused() -> None:
    gateway = TestGateway()
    response = await gateway.complete(prompt=["a", "b"], n=65)
    assert_refused(response, 400, "invalid_value", "n", "65", "2 prompts", "130", "128")
    assert not gateway.dispatcher.generations


async def test_two_limits_that_contradict_each_other_are_refused() -> None:
    response = await TestGateway().chat(max_tokens=5, max_completion_tokens=6)
    assert_refused(response, 400, "invalid_value", "max_completion_tokens", "5", "6")
    assert (await TestGateway().chat(max_tokens=5, max_completion_tokens=5)).status_code == 200


async def test_bodies_beyond_the_limit_are_refused_announced_or_not() -> None:
    gateway = TestGateway(limits=GatewayLimits(max_body_bytes=1000))
    body = json.dumps(prompt_json(prompt="x" * 1000)).encode()
    assert_refused(await gateway.post(COMPLETIONS, body), 413, "request_too_large", None, "1000 bytes")

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, content=pieces())
    assert_refused(response, 413, "request_too_large", None, "1000 bytes")


@pytest.mark.parametrize("content", ["[" + "5," * 250_000 + "5]", '"' + "x" * 600_000 + '"'])
async def test_a_megabyte_is_answered(content: str) -> None:
    body = f'{{"model": "{MODEL_NAME}", "prompt": {content}}}'.encode()
    assert_refused(await TestGateway().post(COMPLETIONS, body), 400, "context_length_exceeded", None, "at most 255")


async def test_a_megabyte_of_wrong_items_is_answered() -> None:
    body = b'{"model": "tiny-model", "messages": [' + b"1," * 400_000 + b"1]}"
    assert_refused(await TestGateway().post(CHAT, body), 400, "invalid_value", "messages.0", "1")


async def test_a_model_that_is_not_served() -> None:
    for response in (await TestGateway().complete(model="gpt-4"), await TestGateway().chat(model="gpt-4")):
        assert_refused(response, 404, "model_not_found", "model", "'gpt-4'", MODEL_NAME)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with TestGateway().client() as client:
        response = await client.request(method, path)
    assert_refused(response, status, code, None, path)


async def test_what_a_message_repeats_of_the_request_is_short() -> None:
    for fields in ({"x" * 500_000: 1}, {"stop": "x" * 500_000}, {"user": ["x"] * 100_000}, {"model": "m" * 500_000}):
        response = await TestGateway().complete(**fields)
        assert 400 <= response.status_code < 500
        assert len(response.content) < 600
