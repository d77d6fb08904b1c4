"""Generations that go well, are refused, or are closed by their caller, over real gRPC."""

import asyncio

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import BadRequest, Draining, NoRoom, NoWorker, NumericFailure
from common.prefix_index.base import Holder, PrefixIndexUnavailable
from common.prefix_index.memory import MemoryPrefixIndex
from common.telemetry import names
from common.telemetry.setup import make_telemetry
from gateway.generation import OnFailure, Route
from gateway.journey import Journey
from tests.support.fake_worker import fail_with, hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, PROMPT, GatewayStack, make_generation, running, wanted


def one_each(**options: object) -> GatewayStack:
    return GatewayStack([FakePrefill("p0")], [FakeDecode("d0")], **options)  # type: ignore[arg-type]


async def test_hand_off() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].num_cached_tokens = 32
        generation = make_generation()
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert outcome.finish_reason == "length"
        assert {delta.num_cached_tokens for delta in outcome.deltas} == {32}
        assert outcome.route == Route("p0", "d0", "least_load", "")
        [request] = stack.prefill[0].requests
        assert request.decode_address == stack.decode[0].address
        assert (request.generation, request.tenant_salt) == (1, stack.decode[0].requests[0].tenant_salt)
        await stack.dispatcher.settled()
        assert stack.prefill[0].released == stack.decode[0].released == {request.transfer_id: 1}
        assert stack.sample("twostroke_placements_total", reason="least_load") == 1


async def test_times_are_filled_in() -> None:
    async with running(one_each()) as stack:
        generation = make_generation()
        await stack.run(generation)
        times = generation.times
        assert 0 < times.dispatched <= times.run_started <= times.first_token
        assert times.place_s > 0
        assert times.reserve_s > 0
        assert (times.queue_s, times.prefill_s) == (0.25, 0.5)
        assert times.place_s + times.reserve_s <= times.run_started - times.dispatched


async def test_decode_alone() -> None:
    async with running(GatewayStack([], [FakeDecode("d0", tokens_per_event=4)])) as stack:
        stack.decode[0].num_cached_tokens = 16
        generation = make_generation()
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert [len(delta.tokens) for delta in outcome.deltas] == [4, 2]
        assert {delta.num_cached_tokens for delta in outcome.deltas} == {16}
        assert outcome.route == Route("", "d0", "decode_alone", "")
        assert (generation.times.queue_s, generation.times.prefill_s) == (0.25, 0.5)
        assert "reserve" not in stack.decode[0].points.num_reached


async def test_cached_tokens_never_exceed_the_prompt() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].num_cached_tokens = 10_000
        outcome = await stack.run(make_generation())
        assert outcome.deltas[0].num_cached_tokens == len(PROMPT)


async def test_first_token_ends_the_request() -> None:
    async with running(one_each()) as stack:
        outcome = await stack.run(make_generation(max_tokens=1))
        assert (len(outcome.token_ids), outcome.finish_reason) == (1, "length")
        await stack.dispatcher.settled()
        assert not any(
            point.startswith("token") and point[5:].isdigit() for point in stack.decode[0].points.num_reached
        )
        assert stack.sample("twostroke_released_blocks_total", role="decode") == 3  # 40 tokens were promised


async def test_stop_token_ends_the_request() -> None:
    async with running(one_each()) as stack:
        third = wanted(make_generation())[2]
        generation = make_generation(stop=frozenset({third}))
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert (len(outcome.token_ids), outcome.finish_reason) == (3, "stop")


async def test_first_token_does_not_wait_for_the_transfer() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].points.actions["first_token"] = hang
        stream = stack.dispatcher.generate(make_generation(), Route())
        async with asyncio.timeout(PATIENCE_S):
            delta = await anext(stream)
        assert len(delta.tokens) == 1
        await stream.aclose()


async def test_both_calls_are_open_before_the_first_token() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].points.actions["run"] = lambda: stack.decode[0].points.reached("generate")
        stack.decode[0].points.actions["generate"] = lambda: stack.prefill[0].points.reached("run")
        assert (await stack.run(make_generation())).finish_reason == "length"


async def test_refused_everywhere_is_no_room() -> None:
    stack = GatewayStack([FakePrefill("p0")], [FakeDecode("d0"), FakeDecode("d1")])
    async with running(stack):
        for decode in stack.decode:
            decode.points.actions["reserve"] = fail_with(NoRoom("full", retry_after_s=3.0))
        with pytest.raises(NoRoom, match="full") as caught:
            await stack.run(make_generation())
        assert caught.value.retry_after_s == 3.0
        assert [decode.points.num_reached["reserve"] for decode in stack.decode] == [1, 1]
        assert not stack.prefill[0].requests


async def test_refused_by_one_goes_to_the_other() -> None:
    stack = GatewayStack([FakePrefill("p0")], [FakeDecode("d0"), FakeDecode("d1")])
    async with running(stack):
        stack.decode[0].points.actions["reserve"] = fail_with(NoRoom("full"))
        generation = make_generation()
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert outcome.route == Route("p0", "d1", "least_load", "")


async def test_prefill_without_room_is_no_room() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].points.actions["run"] = fail_with(NoRoom("queue is full"))
        with pytest.raises(NoRoom, match="queue is full"):
            await stack.run(make_generation())


async def test_draining_prefill_is_passed_over() -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].points.actions["run"] = fail_with(Draining("on my way out"))
        generation = make_generation()
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert outcome.route.fallback == "no_prefill_worker"


async def test_generate_refused_when_alone() -> None:
    async with running(GatewayStack([], [FakeDecode("d0")])) as stack:
        stack.decode[0].points.actions["generate"] = fail_with(NoRoom("full"))
        with pytest.raises(NoRoom):
            await stack.run(make_generation())


@pytest.mark.parametrize("error", [BadRequest("token id", param="prompt"), NumericFailure("NaN")])
@pytest.mark.parametrize("point", ["run", "computed", "first_token"])
async def test_own_errors_are_not_tried_again(error: BadRequest | NumericFailure, point: str) -> None:
    async with running(one_each()) as stack:
        stack.prefill[0].points.actions[point] = fail_with(error)
        with pytest.raises(type(error)) as caught:
            await stack.run(make_generation())
        assert caught.value.param == error.param
        assert len(stack.prefill[0].requests) == 1
        assert len(stack.decode[0].requests) <= 1


async def test_admission_is_bounded() -> None:
    async with running(one_each(max_active=1)) as stack:
        stream = stack.dispatcher.generate(make_generation(), Route())
        await anext(stream)
        with pytest.raises(NoRoom) as caught:
            await stack.run(make_generation())
        assert caught.value.retry_after_s is not None
        await stream.aclose()
        assert (await stack.run(make_generation())).finish_reason == "length"


async def test_no_worker_at_all() -> None:
    stack = one_each()
    with pytest.raises(NoWorker):
        await stack.run(make_generation())


class AbsentIndex(MemoryPrefixIndex):
    async def longest_prefix(self, hashes: object, holders: object) -> dict[str, int]:
        raise PrefixIndexUnavailable("connection refused")


async def test_index_away() -> None:
    async with running(one_each(index=AbsentIndex())) as stack:
        stack.metrics.index_available(True)
        assert (await stack.run(make_generation())).finish_reason == "length"
        assert stack.sample("twostroke_prefix_index_available") == 0


async def test_longest_prefix_wins() -> None:
    index = MemoryPrefixIndex()
    stack = GatewayStack([FakePrefill("p0"), FakePrefill("p1")], [FakeDecode("d0")], index=index)
    async with running(stack):
        generation = make_generation()
        await stack.run(generation)
        assert stack.prefill[0].requests, "without a prefix the first by name"
        stored = stack.decode[0].requests[0]
        hashes = _hashes_of(stack, stored.tenant_salt)
        await index.publish(Holder("p1", stack.prefill[1].incarnation), hashes, ())  # type: ignore[arg-type]
        outcome = await stack.run(generation)
        assert outcome.route == Route("p1", "d0", "longest_prefix", "")
        assert stack.sample("twostroke_prefix_index_available") == 1


def _hashes_of(stack: GatewayStack, salt: bytes) -> list[bytes]:
    deployment = stack.registry.deployment
    assert deployment is not None
    journey = Journey(
        make_generation(), Route(), deployment, salt, wants_prefill=True, retries_left=0, on_failure=OnFailure.FAIL
    )
    journey.begin_attempt()
    return list(journey.hashes)


async def test_spans_are_children_of_the_request_s() -> None:
    """Placement and reservation are spans of their own; the calls are the request's, not the reservation's."""
    exporter = InMemorySpanExporter()
    tracer = make_telemetry("test", "test", [SimpleSpanProcessor(exporter)]).tracer
    async with running(one_each(tracer=tracer)) as stack:
        with tracer.start_as_current_span(names.SPAN_REQUEST) as request_span:
            await stack.run(make_generation())
        parent = request_span.get_span_context()
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert set(spans) == {names.SPAN_PLACE, names.SPAN_RESERVE, names.SPAN_REQUEST}
        for name in (names.SPAN_PLACE, names.SPAN_RESERVE):
            assert spans[name].parent == parent
        assert (spans[names.SPAN_PLACE].attributes or {})[names.ATTR_DECODE_WORKER] == "d0"
        parents = {stack.prefill[0].points.trace_parents["run"], stack.decode[0].points.trace_parents["generate"]}
        assert parents == {parent.span_id}
        reserve = spans[names.SPAN_RESERVE].get_span_context()
        assert reserve is not None
        assert stack.decode[0].points.trace_parents["reserve"] == reserve.span_id
