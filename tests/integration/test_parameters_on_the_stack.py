"""Every parameter of the API through real processes: the answer is what the plain sampler makes of the same logits.

The first token is prefill's and the others are decode's, so each case is about both.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.sampling import OutputToken
from gateway.seeds import choice_seed
from tests.support.plain_answers import PlainAnswers
from tests.support.served_answers import NUM_TOKENS, PROMPT, Case, Served
from tests.support.stack_process import stack_process
from tests.support.tiny_models import EOS_ID, make_tiny_model

LOGPROB_TOLERANCE = 0.02
"""One INT8 value of K or V that rounds the other way moves it by 1/127 of the vector's largest; measured below 1e-5
where none does."""

GREEDY: Case = {"temperature": 0.0}
RANDOM: Case = {"temperature": 1.5, "seed": 1}
EFFECTIVE: list[tuple[Case, Case]] = [
    (GREEDY, RANDOM),
    (RANDOM, {"seed": 2**64 - 1}),
    (RANDOM, {"temperature": 0.3}),
    (RANDOM, {"top_k": 3}),
    (RANDOM, {"top_p": 0.1}),
    (RANDOM, {"min_p": 0.3}),
    (GREEDY, {"presence_penalty": 2.0}),
    (GREEDY, {"presence_penalty": -2.0}),
    (GREEDY, {"frequency_penalty": 0.2}),
    (GREEDY, {"frequency_penalty": -2.0}),
    (GREEDY, {"repetition_penalty": 1.5}),
    (GREEDY, {"repetition_penalty": 0.6}),
    (RANDOM, {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "top_k": 20, "top_p": 0.8}),
]
"""Base and what is added to it; the addition changes the answer."""
LIKE_GREEDY: list[Case] = [
    {"temperature": 0.0, "seed": 7},
    {"temperature": 1e-9, "seed": 7},
    {"temperature": 2.0, "top_k": 1, "seed": 7},
    {"temperature": 2.0, "min_p": 1.0, "seed": 7},
    {"temperature": 2.0, "top_p": 1e-6, "seed": 7},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    with stack_process(tmp_path_factory.mktemp("state"), "1p1d", str(model)) as running:
        yield Served(running, PlainAnswers(model))
        running.await_idle()
        for worker, load in running.workers().items():
            assert load["free_blocks"] == running.num_blocks[worker], f"{worker} leaked blocks: {load}"


def name(case: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("speculation", [True, False], ids=["speculation", "plain"])
@pytest.mark.parametrize(("base", "added"), EFFECTIVE, ids=name)
def test_a_parameter_does_what_it_says(served: Served, base: Case, added: Case, speculation: bool) -> None:
    case = base | added
    assert served.expect(**case) != served.expect(**base), "an expectation that shows nothing"
    served.check(served.ask(speculation=speculation, **case)["choices"][0], **case)


@pytest.mark.parametrize("case", LIKE_GREEDY, ids=name)
def test_one_candidate_is_the_greedy_answer_whatever_the_seed(served: Served, case: Case) -> None:
    served.check(served.ask(**case)["choices"][0], **GREEDY)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_logit_bias_forces_and_bans(served: Served, sampling: Case) -> None:
    forced = served.plain.encode("_")[0]
    choice = served.ask(logit_bias={str(forced): 100}, **sampling)["choices"][0]
    assert choice["text"] == "_" * NUM_TOKENS
    unbanned = served.expect(**sampling)
    bans = {token.token_id: -100.0 for token in unbanned}
    choice = served.ask(logit_bias={str(token_id): bias for token_id, bias in bans.items()}, **sampling)["choices"][0]
    assert not {served.spell(token) for token in unbanned} & set(choice["logprobs"]["tokens"])
    served.check(choice, logit_bias=bans, **sampling)


def test_log_probabilities_are_the_model_s_own_on_both_legs(served: Served) -> None:
    """Of the distribution before any filter; the chosen token and the likeliest, most likely first."""
    expected = served.expect(num_logprobs=20, **RANDOM)
    for speculation in (True, False):
        logprobs = served.ask(logprobs=20, speculation=speculation, top_k=0, **RANDOM)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [served.spell(token) for token in expected]
        chosen = [token.logprob for token in expected]
        assert logprobs["token_logprobs"] == pytest.approx(chosen, abs=LOGPROB_TOLERANCE)
        for found, token in zip(logprobs["top_logprobs"], expected, strict=True):
            values = [value for text, value in found.items() if text != served.spell(token)]
            assert values == sorted(values, reverse=True)
            assert sum(map(math.exp, found.values())) <= 1 + 1e-9
            likeliest = {served.spell(OutputToken(token_id)): value for token_id, value in token.top_logprobs}
            assert {text: found[text] for text in likeliest} == pytest.approx(likeliest, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    ("is_in_first_token", "sampling"),
    [(True, GREEDY), (False, RANDOM)],
    ids=["in prefill's token", "over two of decode's"],
)
def test_a_stop_string_cuts_the_text(served: Served, is_in_first_token: bool, sampling: Case) -> None:
    """A word is forced where the first token has to be one: what a random model says may be half a character."""
    word = next(i for i in range(512) if len(piece := served.plain.tokenizer.token_bytes(i)) > 1 and piece.isalpha())
    bias = {word: 100.0} if is_in_first_token else {}
    expected = served.expect(**sampling, logit_bias=bias)
    sampling = sampling | {"logit_bias": {str(token_id): value for token_id, value in bias.items()}}
    text = served.text(expected)
    tokens = [served.spell(token) for token in expected]
    ends = [len(served.text(expected[:n])) for n in range(2, NUM_TOKENS)]
    over_two = (text[end - 1 : end + 1] for end in ends)
    whole = (part for part in over_two if "\N{REPLACEMENT CHARACTER}" not in part)
    stop = tokens[0][1:] if is_in_first_token else next(part for part in whole if len(part) == 2)
    assert stop in text
    assert is_in_first_token or not any(stop in token for token in tokens)
    body = served.ask(stop=["never said", stop], **sampling)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    num_needed = next(n for n in range(1, NUM_TOKENS) if stop in served.text(expected[:n]))
    assert body["usage"]["completion_tokens"] == num_needed == len(choice["logprobs"]["tokens"])
    chunks = served.stream(prompt=PROMPT, stop=stop, **sampling)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_characters_over_token_borders_come_whole(served: Served) -> None:
    """Bytes of `é` forced in turns: now whole characters, now halves that are none."""
    first, second = (i for i in range(512) if served.plain.tokenizer.token_bytes(i) in (b"\xc3", b"\xa9"))
    bias = {first: 100.0, second: 100.0}
    case: Case = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": bias, **GREEDY}
    text = served.text(served.expect(**case))
    assert "é" in text
    assert "\N{REPLACEMENT CHARACTER}" in text
    sent = case | {"logit_bias": {str(token_id): value for token_id, value in bias.items()}}
    assert served.ask(**sent)["choices"][0]["text"] == text
    pieces = [chunk["choices"][0]["text"] for chunk in served.stream(prompt=PROMPT, **sent)]
    assert "".join(pieces) == text
    assert sum(piece.count("é") for piece in pieces) == text.count("é"), "none is split over two events"


@pytest.mark.parametrize("parameter", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_a_limit_of_tokens_and_usage(served: Served, parameter: str, limit: int) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        model = served.stack.client.get("/v1/models").json()["data"][0]["id"]
        fields = {"model": model, "ignore_eos": True, parameter: limit} | GREEDY | prompt
        body = served.stack.client.post(path, json=fields).json()
        assert body["choices"][0]["finish_reason"] == "length"
        usage = body["usage"]
        assert usage["completion_tokens"] == limit
        assert usage["total_tokens"] == usage["prompt_tokens"] + limit
        if "prompt" in prompt:
            assert usage["prompt_tokens"] == len(served.plain.encode(PROMPT))
            assert body["choices"][0]["text"] == served.text(served.expect(**GREEDY)[:limit])


def test_choices_are_distinct_and_each_is_the_answer_of_its_own_seed(served: Served) -> None:
    body = served.ask(n=4, **RANDOM)
    assert len({choice["text"] for choice in body["choices"]}) == 4
    assert body["usage"]["completion_tokens"] == 4 * NUM_TOKENS
    assert body["usage"]["prompt_tokens"] == len(served.plain.encode(PROMPT))
    for choice in body["choices"]:
        seed = choice_seed(1, 0, choice["index"])
        served.check(choice, temperature=1.5, seed=seed)
        assert served.ask(temperature=1.5, seed=seed)["choices"][0]["text"] == choice["text"]
    assert served.ask(**RANDOM)["choices"][0]["text"] == body["choices"][0]["text"]


def test_several_prompts_are_answered_as_alone(served: Served) -> None:
    prompts = [PROMPT, "0 1 2 3 4 5", "Größe"]
    body = served.ask(prompt=prompts, **GREEDY)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        assert served.ask(prompt=prompt, **GREEDY)["choices"][0]["text"] == choice["text"]
        by_ids = served.ask(prompt=served.plain.encode(prompt), **GREEDY)
        assert by_ids["choices"][0]["text"] == choice["text"]


@pytest.mark.parametrize("bias", [100.0, 1.5], ids=["first token", "later token"])
def test_the_end_of_sequence_token_ends_the_answer_unless_it_is_ignored(served: Served, bias: float) -> None:
    case: Case = {"logit_bias": {EOS_ID: bias}, **RANDOM}
    sent = case | {"logit_bias": {str(EOS_ID): bias}}
    expected = served.expect(stop_token_ids=frozenset({EOS_ID}), **case)
    assert expected[-1].token_id == EOS_ID
    assert (len(expected) == 1) == (bias == 100.0)
    body = served.ask(ignore_eos=False, **sent)
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", served.text(expected))
    assert choice["logprobs"]["tokens"] == [served.spell(token) for token in expected]
    assert body["usage"]["completion_tokens"] == len(expected)
    ignored = served.ask(**sent)
    assert ignored["choices"][0]["finish_reason"] == "length"
    served.check(ignored["choices"][0], **case)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_a_stream_says_what_the_whole_answer_says(served: Served, sampling: Case) -> None:
    whole = served.ask(n=2, **sampling)
    chunks = served.stream(prompt=PROMPT, n=2, logprobs=3, stream_options={"include_usage": True}, **sampling)
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    for expected in whole["choices"]:
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [expected["finish_reason"]]
        for field in expected["logprobs"]:
            joined = [item for part in parts if part["logprobs"] for item in part["logprobs"][field]]
            if field != "top_logprobs":
                assert joined == (
                    pytest.approx(expected["logprobs"][field], abs=LOGPROB_TOLERANCE)
                    if field == "token_logprobs"
                    else expected["logprobs"][field]
                )


def test_chat_streams_what_the_whole_answer_says(served: Served) -> None:
    bias = dict.fromkeys(("0", "1", "2"), -100)  # no special tokens: they are told and are no text
    fields: Case = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2, **RANDOM}
    fields["logit_bias"] = bias
    model = served.stack.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields
    whole = served.stack.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    deltas = [chunk["choices"][0] for chunk in served.stream("/v1/chat/completions", **fields)]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == whole["message"]["content"]
    tokens = [item for delta in deltas if delta["logprobs"] for item in delta["logprobs"]["content"]]
    assert [item["token"] for item in tokens] == [item["token"] for item in whole["logprobs"]["content"]]
    assert all(len(item["top_logprobs"]) == 2 for item in tokens)
    assert b"".join(bytes(item["bytes"]) for item in tokens).decode(errors="replace") == whole["message"]["content"]


def test_decode_goes_on_as_prefill_would_begin(served: Served) -> None:
    """The token that decode samples after k others is the one that prefill samples first with those k in the prompt."""
    prompt = served.plain.encode(PROMPT)
    expected = served.expect(**GREEDY)
    for k in range(1, 8):
        longer = [*prompt, *(token.token_id for token in expected[:k])]
        found = served.ask(prompt=longer, max_tokens=1, **GREEDY)["choices"][0]["logprobs"]["tokens"]
        assert found == [served.spell(expected[k])]


def test_sampled_answers_do_not_depend_on_the_topology_or_the_crowd(
    served: Served, model: Path, tmp_path: Path
) -> None:
    """Decode alone samples the first token too."""
    cases = [base | added for base, added in EFFECTIVE]
    with stack_process(tmp_path, "colocated", str(model)) as running, ThreadPoolExecutor(8) as pool:
        alone = Served(running, served.plain)
        choices = list(pool.map(lambda case: alone.ask(**case)["choices"][0], cases))
    for case, choice in zip(cases, choices, strict=True):
        served.check(choice, **case)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 3),
        ("tools", [{}]),
        ("response_format", {"type": "json_object"}),
        ("min_tokens", 3),
        ("stop_token_ids", [1]),
        ("guided_regex", "x"),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("n", 0),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served: Served, parameter: str, value: Any) -> None:
    body = served.stack.complete(PROMPT, **{parameter: value})
    assert body["status"] == 400
    assert body["error"]["param"] == parameter
    assert parameter in body["error"]["message"]
