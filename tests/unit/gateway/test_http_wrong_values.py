"""Fields with a wrong type or value get a 400 that names the field and the value, before any worker is asked."""

from typing import Any

import pytest

from tests.support.gateway_app import TestGateway, assert_refused, prompt_json
from tests.support.tiny_tokenizers import MODEL_NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("model", 5, "5"),
        ("model", "", "''"),
        ("prompt", 5, "5"),
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", [[]], "prompt[0] is empty"),
        ("prompt", ["a", ""], "prompt[1] is empty"),
        ("prompt", ["a", 1], "prompt[1] is 1"),
        ("prompt", [1, "a"], "prompt[1] is 'a'"),
        ("prompt", [[1], "a"], "prompt[1] is 'a'"),
        ("prompt", [1, 2.0], "prompt[1] is 2.0"),
        ("prompt", [True], "prompt[0] is true"),
        ("prompt", [[1, None]], "prompt[0][1] is null"),
        ("prompt", {"text": "a"}, "text"),
        ("prompt", [1, 100_000], "100000"),
        ("prompt", [1, -1], "-1"),
        ("prompt", "\ud800", "surrogate"),
        ("stream", "true", "'true'"),
        ("stream", 1, "1"),
        ("n", 0, "0"),
        ("n", 129, "129"),
        ("n", 1.0, "1.0"),
        ("n", "5", "'5'"),
        ("n", True, "true"),
        ("max_tokens", 0, "0"),
        ("max_tokens", -5, "-5"),
        ("max_tokens", 2.5, "2.5"),
        ("max_tokens", "16", "'16'"),
        ("max_tokens", True, "true"),
        ("temperature", -0.1, "-0.1"),
        ("temperature", 2.5, "2.5"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "true"),
        ("temperature", [1], "[1]"),
        ("top_p", 0, "0"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -1, "-1"),
        ("top_k", 2**40, str(2**40)),
        ("top_k", 1.5, "1.5"),
        ("min_p", 2, "2"),
        ("seed", -1, "-1"),
        ("seed", 1.5, "1.5"),
        ("seed", "7", "'7'"),
        ("presence_penalty", 3, "3"),
        ("frequency_penalty", -3, "-3"),
        ("repetition_penalty", 0, "0"),
        ("logit_bias", [], "[]"),
        ("logit_bias", {"x": 1}, "'x'"),
        ("logit_bias", {" 5": 1}, "' 5'"),
        ("logit_bias", {"05": 1}, "'05'"),
        ("logit_bias", {"-1": 1}, "'-1'"),
        ("logit_bias", {"5": "1"}, "'1'"),
        ("logit_bias", {str(token_id): 1 for token_id in range(1025)}, "1025 token ids; the limit is 1024"),
        ("logit_bias", {"5": True}, "true"),
        ("logit_bias", {"5": 101}, "101"),
        ("logit_bias", {"100000": 1}, "100000"),
        ("stop", 5, "5"),
        ("stop", "", "0 characters"),
        ("stop", ["a", ""], "0 characters"),
        ("stop", ["a", 5], "5"),
        ("stop", ["a"] * 17, "17"),
        ("stop", "a" * 1025, "1025"),
        ("stop", "\ud800", "surrogate"),
        ("logprobs", 21, "21"),
        ("logprobs", -1, "-1"),
        ("logprobs", True, "true"),
        ("ignore_eos", 1, "1"),
        ("speculation", "no", "'no'"),
        ("user", 5, "5"),
        ("stream_options", {"include_usage": True}, "stream: true"),
    ],
)
async def test_wrong_types_and_values_of_completions(field: str, value: Any, part: str) -> None:
    gateway = TestGateway()
    response = await gateway.post(COMPLETIONS, prompt_json(**{field: value}))
    if field == "model" and value == "":
        assert_refused(response, 404, "model_not_found", "model", part)
    else:
        assert_refused(response, 400, "invalid_value", field, part)
    assert not gateway.dispatcher.generations


@pytest.mark.parametrize(
    ("field", "value", "param", "part"),
    [
        ("messages", "hi", "messages", "'hi'"),
        ("messages", [], "messages", "[]"),
        ("messages", [5], "messages.0", "5"),
        ("messages", [*HELLO, {"role": "user"}], "messages.1.content", "missing"),
        ("messages", [{"content": "x"}], "messages.0.role", "missing"),
        ("messages", [{"role": "tool", "content": "x"}], "messages.0.role", "'tool'"),
        ("messages", [{"role": "function", "content": "x"}], "messages.0.role", "'function'"),
        ("messages", [{"role": "user", "content": None}], "messages.0.content", "null"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content", "5"),
        ("messages", [{"role": "user", "content": []}], "messages.0.content", "[]"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0", "text"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages.0.content.0", "'x'"),
        ("messages", [{"role": "user", "content": "\ud800"}], "messages.0.content", "surrogate"),
        ("logprobs", 5, "logprobs", "5"),
        ("top_logprobs", 2, "top_logprobs", "logprobs: true"),
        ("max_completion_tokens", 0, "max_completion_tokens", "0"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage", "'yes'"),
    ],
)
async def test_wrong_types_and_values_of_chat(field: str, value: Any, param: str, part: str) -> None:
    gateway = TestGateway()
    body = {"model": MODEL_NAME, "messages": HELLO} | {field: value}
    assert_refused(await gateway.post(CHAT, body), 400, "invalid_value", param, part)
    assert not gateway.dispatcher.generations


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_missing_fields_are_named(missing: str) -> None:
    body = {name: value for name, value in prompt_json().items() if name != missing}
    assert_refused(await TestGateway().post(COMPLETIONS, body), 400, "invalid_value", missing, "missing")
    assert_refused(await TestGateway().post(COMPLETIONS, body | {missing: None}), 400, "invalid_value", missing)
