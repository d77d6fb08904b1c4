"""/v1/chat/completions: what a client sees, streamed and whole."""

from typing import Any

import pytest

from tests.support.fake_dispatcher import says
from tests.support.gateway_app import TestGateway, chunks_of
from tests.support.tiny_tokenizers import MAX_MODEL_LEN, MODEL_NAME, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


async def test_a_whole_answer() -> None:
    response = await TestGateway().chat(seed=7)
    body = response.json()
    assert body.pop("usage")["total_tokens"] > 0
    assert body == {
        "id": response.headers["x-request-id"],
        "object": "chat.completion",
        "created": body["created"],
        "model": MODEL_NAME,
        "seed": 7,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }
    assert body["id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "developer", "content": "Be brief."}],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
        ),
        ([{"role": "assistant", "content": ""}], "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
async def test_the_prompt_is_the_chat_template_s(messages: list[dict[str, Any]], prompt: str) -> None:
    gateway = TestGateway()
    assert (await gateway.chat(messages=messages)).status_code == 200
    expected = TOKENIZER.encode(prompt, add_special_tokens=False)
    assert gateway.dispatcher.generations[0].token_ids == tuple(expected)


async def test_a_stream_opens_with_the_role() -> None:
    chunks = chunks_of(await TestGateway().chat(stream=True))
    first = chunks[0]["choices"][0]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    assert all(delta.keys() <= {"content"} for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world!"
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_every_choice_of_a_stream_opens_with_the_role() -> None:
    chunks = chunks_of(await TestGateway().chat(stream=True, n=3))
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1, 2]


async def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    gateway = TestGateway()
    await gateway.chat()
    (generation,) = gateway.dispatcher.generations
    assert generation.sampling.max_tokens == MAX_MODEL_LEN - len(generation.token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(name: str) -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, world!"))
    body = (await gateway.chat(**{name: 2})).json()
    assert gateway.dispatcher.generations[0].sampling.max_tokens == 2
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_carry_bytes(stream: bool) -> None:
    response = await TestGateway(says(TOKENIZER, "水!")).chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(response)]
        content = [entry for part in parts if part for entry in part["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    *text_entries, eos = content
    assert bytes(byte for entry in text_entries for byte in entry["bytes"]).decode() == "水!"
    assert eos["token"] == "<|im_end|>"
    first = content[0]
    assert first["token"] == "bytes:\\xe6"
    assert first["logprob"] == -0.25
    assert [entry.keys() for entry in first["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert first["top_logprobs"][0] | {"top_logprobs": first["top_logprobs"]} == first


async def test_logprobs_of_the_chosen_token_alone() -> None:
    body = (await TestGateway().chat(logprobs=True)).json()
    assert all(entry["top_logprobs"] == [] for entry in body["choices"][0]["logprobs"]["content"])


async def test_a_model_without_a_chat_template_is_named() -> None:
    response = await TestGateway(tokenizer=tiny_tokenizer(chat_template=None)).chat()
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_what_the_template_refuses_is_the_client_s_mistake() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    response = await TestGateway(tokenizer=tiny_tokenizer(chat_template=template)).chat()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "roles must alternate" in response.json()["error"]["message"]


async def test_u2028_leaves_as_an_escape() -> None:
    """Some clients break the lines of an event stream at it."""
    response = await TestGateway(says(TOKENIZER, "a\u2028b\x85c")).chat(stream=True)
    assert "\u2028" not in response.text
    assert "\x85" not in response.text
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(response))
    assert text == "a\u2028b\x85c"
