"""What is not supported is refused by name, never ignored; values that ask for nothing are accepted."""

from typing import Any

import pytest

from tests.support.gateway_app import TestGateway, assert_refused, prompt_json
from tests.support.tiny_tokenizers import MODEL_NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("echo", True),
        ("best_of", 2),
        ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
        ("remote_host", "10.0.0.1"),
        ("ticket", "x"),
        ("tenant", "other"),
        ("messages", HELLO),
        ("top_logprobs", 2),
        ("Temperature", 1),
        ("", 1),
        ("\ud800", 1),
        ("unknown", None),
    ],
)
async def test_parameters_that_completions_do_not_have(field: str, value: Any) -> None:
    response = await TestGateway().post(COMPLETIONS, prompt_json(**{field: value}))
    assert_refused(response, 400, "unsupported_parameter", field, field if field != "\ud800" else "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "text", "schema": {}}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("modalities", ["audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("store", True),
        ("store", 0),
        ("metadata", {"a": "b"}),
        ("service_tier", "priority"),
        ("web_search_options", {}),
        ("prompt_cache_key", "k"),
        ("prompt", "x"),
        ("kv_transfer_params", {}),
        ("data_parallel_rank", 0),
    ],
)
async def test_parameters_that_chat_does_not_have(field: str, value: Any) -> None:
    body = {"model": MODEL_NAME, "messages": HELLO} | {field: value}
    assert_refused(await TestGateway().post(CHAT, body), 400, "unsupported_parameter", field, field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "name": "Ada"}, "messages.0.name"),
        ({"role": "user", "content": "x", "weight": 1}, "messages.0.weight"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages.0.content.0"),
    ],
)
async def test_messages_with_what_is_not_supported(message: dict[str, Any], param: str) -> None:
    response = await TestGateway().chat(messages=[message])
    assert_refused(response, 400, "unsupported_parameter", param)


async def test_obfuscation_that_cannot_be_given_is_refused() -> None:
    response = await TestGateway().chat(stream=True, stream_options={"include_obfuscation": True})
    assert_refused(response, 400, "invalid_value", "stream_options.include_obfuscation", "true")


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    harmless = {
        "tools": [], "tool_choice": "none", "functions": None, "function_call": "none", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "audio": None, "modalities": ["text"], "prediction": None,
        "reasoning_effort": None, "verbosity": None, "store": False, "metadata": {}, "service_tier": "auto",
        "web_search_options": None, "prompt_cache_key": None, "user": "someone", "safety_identifier": "someone",
        "temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "logit_bias": None,
        "logprobs": None, "top_logprobs": None, "stream": None, "stream_options": None, "max_tokens": None,
    }  # fmt: skip
    own_answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    assert (await TestGateway().chat(messages=[*HELLO, own_answer, *HELLO], **harmless)).status_code == 200
    harmless = {"suffix": None, "echo": False, "best_of": 1, "logprobs": None, "user": "someone", "n": 1}
    assert (await TestGateway().complete(**harmless)).status_code == 200
