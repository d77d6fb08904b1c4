"""Spans and metrics of requests, on a clock of the test's own."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from common.errors import PeerLost
from common.sampling import FinishReason
from common.telemetry import names
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import Step, says, tokens_of
from tests.support.gateway_app import TestGateway
from tests.support.tiny_tokenizers import MODEL_NAME, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class TickingClock:
    """One second passes at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def spans_by_name(gateway: TestGateway) -> dict[str, ReadableSpan]:
    return {span.name: span for span in gateway.spans.get_finished_spans()}


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def sample(gateway: TestGateway, name: str, **labels: str) -> float | None:
    return gateway.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_root_span_tells_the_request(stream: bool) -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello", num_cached_tokens=2), clock=TickingClock())
    gateway.dispatcher.route.fallback = "prefill_lost"
    response = await gateway.chat(stream=stream)
    spans = spans_by_name(gateway)
    root, tokenize = spans[names.SPAN_REQUEST], spans[names.SPAN_TOKENIZE]
    assert root.parent is None
    assert tokenize.parent is not None
    assert root.context is not None
    assert tokenize.parent.span_id == root.context.span_id
    attributes = attributes_of(root)
    assert attributes[names.ATTR_OPERATION] == "chat"
    assert attributes[names.ATTR_REQUEST_MODEL] == MODEL_NAME
    assert attributes[names.ATTR_RESPONSE_ID] == response.headers["x-request-id"]
    assert attributes[names.ATTR_INPUT_TOKENS] == len(gateway.dispatcher.generations[0].token_ids)
    assert attributes[names.ATTR_CACHED_TOKENS] == 2
    assert attributes[names.ATTR_OUTPUT_TOKENS] == len(TOKENIZER.encode("Hello", add_special_tokens=False)) + 1
    assert attributes[names.ATTR_FINISH_REASONS] == ("stop",)
    assert attributes[names.ATTR_PREFILL_WORKER] == "prefill-0"
    assert attributes[names.ATTR_DECODE_WORKER] == "decode-0"
    assert attributes[names.ATTR_PLACEMENT_REASON] == "least_load"
    assert attributes[names.ATTR_FALLBACK] == "prefill_lost"
    assert attributes[names.ATTR_HTTP_STATUS] == 200
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_parts_of_the_ttft_add_up_in_the_span(stream: bool, n: int) -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello"), clock=TickingClock())
    await gateway.complete(stream=stream, n=n)
    attributes = attributes_of(spans_by_name(gateway)[names.SPAN_REQUEST])
    parts = [attributes[name] for name in names.TTFT_PARTS]
    assert sum(parts) == attributes[names.ATTR_TTFT]
    assert all(part >= 0 for part in parts)
    times = gateway.dispatcher.generations[0].times
    assert times.tokenize_s == 1.0
    assert times.received < times.dispatched < times.first_token < times.first_byte <= times.last_byte


async def test_the_first_byte_is_the_first_that_can_be_seen() -> None:
    """A held-back character, and the role that opens a stream, are nothing to see."""
    water = TOKENIZER.encode("水", add_special_tokens=False)

    def script(_: Generation) -> list[Step]:
        return [TokenDelta(tokens_of([token_id])) for token_id in water] + [TokenDelta((), FinishReason.LENGTH)]

    gateway = TestGateway(script, clock=TickingClock())
    await gateway.chat(stream=True)
    times = gateway.dispatcher.generations[0].times
    assert times.first_byte - times.first_token > len(water) - 1


async def test_the_caller_s_trace_goes_on() -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    gateway = TestGateway()
    response = await gateway.complete({"traceparent": f"00-{trace_id}-{span_id}-01"})
    root = spans_by_name(gateway)[names.SPAN_REQUEST]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == span_id
    assert response.headers["x-twostroke-trace-id"] == trace_id
    version, told_trace_id, told_span_id, _ = response.headers["traceresponse"].split("-")
    assert root.context is not None
    assert (version, told_trace_id, told_span_id) == ("00", trace_id, f"{root.context.span_id:016x}")


@pytest.mark.parametrize("header", ["", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff"])
async def test_a_broken_traceparent_starts_a_new_trace(header: str) -> None:
    gateway = TestGateway()
    async with gateway.client() as client:
        body = {"model": MODEL_NAME, "prompt": "hi"}
        response = await client.post("/v1/completions", json=body, headers=[(b"traceparent", header.encode("latin-1"))])
    assert response.status_code == 200
    assert spans_by_name(gateway)[names.SPAN_REQUEST].parent is None


async def test_the_dispatcher_runs_inside_the_root_span() -> None:
    seen: list[int] = []

    def script(generation: Generation) -> list[Step]:
        seen.append(trace.get_current_span().get_span_context().span_id)
        return list(says(TOKENIZER, "hi")(generation))

    gateway = TestGateway(script)
    for fields in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
        gateway.spans.clear()
        seen.clear()
        await gateway.complete(**fields)
        root = spans_by_name(gateway)[names.SPAN_REQUEST]
        assert root.context is not None
        assert set(seen) == {root.context.span_id}


async def test_errors_are_told_by_code_and_never_by_text() -> None:
    def breaks(_: Generation) -> list[Step]:
        return [TokenDelta(tokens_of([20])), PeerLost("secret words")]

    gateway = TestGateway(breaks)
    await gateway.complete(prompt="secret words", stream=True)
    await gateway.complete(prompt="secret words")
    await gateway.complete(prompt="secret words", temperature="secret words")
    broken, failed, refused = [s for s in gateway.spans.get_finished_spans() if s.name == names.SPAN_REQUEST]
    assert attributes_of(broken)[names.ATTR_ERROR_TYPE] == "peer_lost"
    assert attributes_of(broken)[names.ATTR_HTTP_STATUS] == 502, "though 200 was sent before"
    assert broken.status.status_code is StatusCode.ERROR
    assert attributes_of(failed)[names.ATTR_HTTP_STATUS] == 502
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes_of(refused)[names.ATTR_ERROR_TYPE] == "invalid_value"
    assert refused.status.status_code is StatusCode.UNSET
    for span in gateway.spans.get_finished_spans():
        assert "secret" not in span.to_json()


async def test_metrics_count_requests_and_tokens() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello", num_cached_tokens=2), clock=TickingClock())
    await gateway.complete(prompt=[5, 6, 7], stream=True)
    await gateway.complete(prompt=[5, 6, 7])
    await gateway.complete(nonsense=1)
    async with gateway.client() as client:
        await client.get("/nope")
        text = (await client.get("/metrics")).text
    num_tokens = len(TOKENIZER.encode("Hello", add_special_tokens=False)) + 1
    assert sample(gateway, names.METRIC_REQUESTS, route="/v1/completions", status="200") == 2
    assert sample(gateway, names.METRIC_REQUESTS, route="/v1/completions", status="400") == 1
    assert sample(gateway, names.METRIC_REQUESTS, route="other", status="404") == 1
    assert sample(gateway, names.METRIC_PROMPT_TOKENS) == 6
    assert sample(gateway, names.METRIC_CACHED_TOKENS) == 4
    assert sample(gateway, names.METRIC_OUTPUT_TOKENS) == 2 * num_tokens
    assert sample(gateway, names.METRIC_ACTIVE_REQUESTS) == 0
    assert sample(gateway, f"{names.METRIC_TTFT}_count") == 1, "of streams alone"
    assert sample(gateway, f"{names.METRIC_TPOT}_count") == 2
    assert sample(gateway, f"{names.METRIC_DURATION}_count") == 2
    assert f"{names.METRIC_TTFT}_bucket" in text
    assert 'le="0.0005"' in text


async def test_tpot_is_the_time_between_tokens() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello", sizes=(1,)), clock=TickingClock())
    await gateway.complete()
    attributes = attributes_of(spans_by_name(gateway)[names.SPAN_REQUEST])
    # One look at the clock per delta, and the first delta is looked at twice: by the dispatcher, then here.
    num_tokens = attributes[names.ATTR_OUTPUT_TOKENS]
    assert attributes[names.ATTR_TPOT] == pytest.approx(num_tokens / (num_tokens - 1))
