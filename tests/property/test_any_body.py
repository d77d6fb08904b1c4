"""Whatever the body: an answer or a 4xx in OpenAI's shape, never a failure of ours, and nothing stays open."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway_app import TestGateway
from tests.support.tiny_tokenizers import MODEL_NAME

GATEWAY = TestGateway()

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 0.0, 2.0, 2**31, 2**63, 2**64])
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["", "\ud800", "\x00", "<|im_end|>", "5", "text"])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3))
small_ints = st.integers(-1, 4)
prompts = (
    texts | st.lists(texts, max_size=3) | st.lists(small_ints, max_size=5) | st.lists(st.lists(small_ints), max_size=3)
)
contents = texts | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": texts}))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]), "content": contents},
        optional={"name": values, "refusal": values},
    ),
    max_size=3,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": prompts,
    "messages": messages,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "other": values}),
    "n": small_ints,
    "max_tokens": small_ints,
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "top_k": small_ints,
    "seed": st.integers(-1, 2**64),
    "stop": texts | st.lists(texts, max_size=3),
    "logprobs": small_ints | st.booleans(),
    "top_logprobs": small_ints,
    "logit_bias": st.dictionaries(st.integers(-1, 500).map(str) | texts, st.floats(-101, 101)),
    "tools": values,
    "response_format": values,
    "best_of": small_ints,
    "echo": st.booleans(),
    "user": texts,
    "ignore_eos": st.booleans(),
}
bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL_NAME) | scalars}, optional={name: field | values for name, field in FIELDS.items()}
)
likely_bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL_NAME), "prompt": prompts, "messages": messages},
    optional={name: field for name, field in FIELDS.items() if name not in ("prompt", "messages")},
)


def relevant(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Most bodies get further without the other endpoint's prompt."""
    return {
        name: value for name, value in body.items() if name != ("messages" if path == "/v1/completions" else "prompt")
    }


async def assert_answered(path: str, body: Any) -> None:
    response = await GATEWAY.post(path, body)
    assert 200 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
    assert GATEWAY.dispatcher.num_open == 0


paths = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


@settings(deadline=None)
@given(paths, likely_bodies | bodies)
async def test_fields_of_all_kinds(path: str, body: dict[str, Any]) -> None:
    await assert_answered(path, relevant(path, body))


@settings(deadline=None)
@given(paths, values)
async def test_any_json(path: str, body: Any) -> None:
    await assert_answered(path, body)


@settings(deadline=None)
@given(paths, st.binary(max_size=40))
async def test_any_bytes(path: str, body: bytes) -> None:
    await assert_answered(path, body)


@settings(deadline=None)
@given(texts, st.sampled_from(["authorization", "traceparent", "tracestate", "content-length-x", "x-request-id"]))
async def test_any_header(value: str, name: str) -> None:
    async with GATEWAY.client() as client:
        body = {"model": MODEL_NAME, "prompt": "hi"}
        headers = [(name.encode(), value.encode("utf-8", "surrogatepass"))]
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
