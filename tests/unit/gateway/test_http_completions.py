"""/v1/completions: what a client sees, streamed and whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from common.sampling import FinishReason
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import Step, says, tokens_of
from tests.support.gateway_app import TestGateway, chunks_of
from tests.support.tiny_tokenizers import EOS_ID, MODEL_NAME, START_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def text_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


async def test_a_whole_answer() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, world!", num_cached_tokens=4))
    response = await gateway.complete(seed=7, max_tokens=50)
    assert response.status_code == 200
    body = response.json()
    num_output_tokens = len(TOKENIZER.encode("Hello, world!", add_special_tokens=False)) + 1  # and the EOS
    num_prompt_tokens = len(gateway.dispatcher.generations[0].token_ids)
    assert body == {
        "id": response.headers["x-request-id"],
        "object": "text_completion",
        "created": body["created"],
        "model": MODEL_NAME,
        "seed": 7,
        "choices": [{"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert body["id"].startswith("cmpl-")


async def test_what_reaches_the_dispatcher() -> None:
    gateway = TestGateway()
    await gateway.complete(
        prompt="Größe", max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"5": -100, "0": 1.5}, logprobs=2, speculation=False,
    )  # fmt: skip
    (generation,) = gateway.dispatcher.generations
    assert generation.token_ids == tuple(TOKENIZER.encode("Größe", add_special_tokens=True))
    assert generation.tenant == "default"
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 40)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {5: -100.0, 0: 1.5})
    assert (sampling.num_logprobs, sampling.speculation, sampling.seed) == (2, False, 3)
    assert sampling.stop_token_ids == {EOS_ID}


async def test_defaults_are_openai_s() -> None:
    gateway = TestGateway()
    await gateway.complete()
    sampling = gateway.dispatcher.generations[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert sampling.num_logprobs is None
    assert sampling.speculation


async def test_ignore_eos_leaves_no_stop_token() -> None:
    gateway = TestGateway()
    await gateway.complete(ignore_eos=True)
    assert gateway.dispatcher.generations[0].sampling.stop_token_ids == frozenset()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ([START_ID], [(START_ID,)]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, expected: list[Any]) -> None:
    gateway = TestGateway()
    response = await gateway.complete(prompt=prompt)
    assert [choice["index"] for choice in response.json()["choices"]] == [*range(len(expected))]
    as_ids = [
        tuple(TOKENIZER.encode(item, add_special_tokens=True)) if isinstance(item, str) else item for item in expected
    ]
    assert [generation.token_ids for generation in gateway.dispatcher.generations] == as_ids
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, as_ids))


@pytest.mark.parametrize("sizes", [(1,), (2, 1, 3), (100,)])
async def test_a_stream_is_the_whole_answer_in_pieces(sizes: tuple[int, ...]) -> None:
    text = "Größe 水 🦊 ok"
    gateway = TestGateway(says(TOKENIZER, text, sizes=sizes))
    response = await gateway.complete(stream=True, max_tokens=50, seed=1)
    chunks = chunks_of(response)
    assert text_of(chunks) == text
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["seed"] for chunk in chunks} == {1}
    assert all("usage" not in chunk for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("�" not in chunk["choices"][0]["text"] for chunk in chunks)


async def test_usage_at_the_end_of_a_stream() -> None:
    gateway = TestGateway()
    *chunks, last = chunks_of(await gateway.complete(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    whole = (await gateway.complete()).json()
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_ask_are_told_what_moving_the_kv_cost(stream: bool) -> None:
    def script(generation: Generation) -> list[Step]:
        if len(gateway.dispatcher.generations) < 3:
            generation.transfer.add(1000, 0.25 * len(gateway.dispatcher.generations))
        return [TokenDelta(tokens_of([5, 6]), FinishReason.LENGTH)]

    async def told(headers: dict[str, str]) -> dict[str, object] | None:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        response = await gateway.complete(headers, prompt=[[5, 6], [7, 8]], **options)
        usage = (chunks_of(response)[-1] if stream else response.json())["usage"]
        found: dict[str, object] | None = usage.get("twostroke")
        return found

    gateway = TestGateway(script)
    assert await told({"x-twostroke-usage": "transfer"}) == {"kv_bytes": 2000, "exposed_transfer_ms": 500}
    assert await told({"x-twostroke-usage": "transfer"}) == {"kv_bytes": None, "exposed_transfer_ms": None}
    assert await told({}) is None
    assert gateway.registry.get_sample_value("twostroke_exposed_transfer_seconds_count") == 2
    response = await gateway.complete({"x-twostroke-usage": "all"})
    assert response.status_code == 400
    assert "x-twostroke-usage is 'all'" in response.json()["error"]["message"]


async def test_max_tokens_ends_with_length() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, world!"))
    body = (await gateway.complete(max_tokens=3)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_over_token_borders(sizes: tuple[int, ...], stream: bool) -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, world! And more.", sizes=sizes))
    response = await gateway.complete(stop=["world! An", "never"], max_tokens=50, stream=stream)
    if stream:
        chunks = chunks_of(response)
        assert text_of(chunks) == "Hello, "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        body = response.json()
        assert body["choices"][0] | {"index": 0} == body["choices"][0]
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Hello, ", "stop")
        # Delivered tokens end with the one that completed the stop string, in whatever company it came.
        token_ids = TOKENIZER.encode("Hello, world! And more.", add_special_tokens=False)
        num_delivered = next(n for n in range(len(token_ids)) if "world! An" in TOKENIZER.decode(token_ids[:n]))
        assert body["usage"]["completion_tokens"] == num_delivered
    if sizes != (100,):
        assert gateway.dispatcher.closed_early  # the rest was not generated
    assert gateway.dispatcher.num_open == 0


async def test_a_stop_string_that_stays_incomplete_is_text() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, wor"))
    body = (await gateway.complete(stop="world")).json()
    assert body["choices"][0]["text"] == "Hello, wor"


async def test_a_character_that_stays_unfinished_is_flushed() -> None:
    fox = TOKENIZER.encode("水", add_special_tokens=False)
    assert len(fox) == 3

    def script(_: Generation) -> list[Step]:
        return [TokenDelta(tokens_of(fox[:2])), TokenDelta((), FinishReason.LENGTH)]

    for stream in (False, True):
        response = await TestGateway(script).complete(stream=stream)
        text = text_of(chunks_of(response)) if stream else response.json()["choices"][0]["text"]
        assert text == "�"


async def test_special_tokens_are_not_text() -> None:
    def script(_: Generation) -> list[Step]:
        hello = TOKENIZER.encode("hi", add_special_tokens=False)
        return [TokenDelta(tokens_of([START_ID, *hello, EOS_ID, *hello], 0), FinishReason.LENGTH)]

    body = (await TestGateway(script).complete(ignore_eos=True, logprobs=0)).json()
    assert body["choices"][0]["text"] == "hihi"
    assert body["choices"][0]["logprobs"]["tokens"][0] == "<|im_start|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_their_offsets(stream: bool) -> None:
    gateway = TestGateway(says(TOKENIZER, "Ü水 ab"))
    response = await gateway.complete(logprobs=2, stream=stream)
    if stream:
        parts = [choice["logprobs"] for chunk in chunks_of(response) for choice in chunk["choices"]]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    token_ids = [*TOKENIZER.encode("Ü水 ab", add_special_tokens=False), EOS_ID]
    pieces = [TOKENIZER.token_bytes(token_id) for token_id in token_ids]
    assert len(pieces) == len(logprobs["tokens"]) == len(logprobs["text_offset"])
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\x9c"]
    assert logprobs["tokens"][-1] == "<|im_end|>"
    starts = [len(b"".join(pieces[:n]).decode(errors="ignore")) for n in range(len(pieces))]
    assert logprobs["text_offset"] == starts
    assert logprobs["token_logprobs"] == [-0.25 - n for n in range(len(pieces))]
    top = logprobs["top_logprobs"][0]
    assert top["bytes:\\xc3"] == -0.25
    assert len(top) == 2


async def test_a_streamed_token_s_logprob_comes_with_its_text() -> None:
    """Held back with the text, as a possible stop string; then cut at the text's end."""
    gateway = TestGateway(says(TOKENIZER, "Hello, world!"))
    chunks = chunks_of(await gateway.complete(logprobs=0, stream=True, stop="world!"))
    text = ""
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        assert all(
            len(text) <= offset < len(text) + len(choice["text"]) for offset in choice["logprobs"]["text_offset"]
        )
        text += choice["text"]
    assert text == "Hello, "
    last = chunks[-1]["choices"][0]
    assert last["text"] == ""
    assert last["logprobs"]["text_offset"] == [len(text)] * len(last["logprobs"]["tokens"])


async def test_logprobs_that_json_cannot_hold() -> None:
    def script(_: Generation) -> list[Step]:
        (token,) = tokens_of([20], 0)
        return [TokenDelta((type(token)(20, float("-inf"), ((21, float("-inf")),)),), FinishReason.LENGTH)]

    response = await TestGateway(script).complete(logprobs=1)
    assert json.loads(response.text)["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_choices_have_seeds_of_their_own() -> None:
    gateway = TestGateway()
    response = await gateway.complete(n=3, prompt=["a", "b"], seed=11)
    seeds = [generation.sampling.seed for generation in gateway.dispatcher.generations]
    assert seeds[0] == 11
    assert len(set(seeds)) == 6
    ids = [generation.request_id for generation in gateway.dispatcher.generations]
    assert ids[0] == response.headers["x-request-id"]
    assert len(set(ids)) == 6
    again = TestGateway()
    await again.complete(n=3, prompt=["a", "b"], seed=11)
    assert [generation.sampling.seed for generation in again.dispatcher.generations] == seeds


async def test_a_seed_is_drawn_and_told() -> None:
    first, second = await TestGateway().complete(), await TestGateway().complete()
    assert first.json()["seed"] != second.json()["seed"]
    assert first.headers["x-twostroke-seed"] == str(first.json()["seed"])
    gateway = TestGateway()
    await gateway.complete(seed=2**64 - 1)
    assert gateway.dispatcher.generations[0].sampling.seed == 2**64 - 1


async def test_streams_of_several_choices_are_told_apart() -> None:
    gateway = TestGateway(lambda generation: says(TOKENIZER, f"seed {generation.sampling.seed}")(generation))
    chunks = chunks_of(await gateway.complete(n=2, prompt=["a", "b"], stream=True, max_tokens=64))
    seeds = [generation.sampling.seed for generation in gateway.dispatcher.generations]
    assert [text_of(chunks, index) for index in range(4)] == [f"seed {seed}" for seed in seeds]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_cached_tokens_of_a_prompt_are_the_fewest_of_its_choices() -> None:
    cached = iter([3, 1, 2, 2])

    def script(generation: Generation) -> list[Step]:
        return [TokenDelta(tokens_of([20]), FinishReason.LENGTH, next(cached))]

    usage = (await TestGateway(script).complete(prompt=[[5, 6, 7, 8], [9, 10, 11]], n=2)).json()["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1 + 2}
    assert usage["completion_tokens"] == 4
