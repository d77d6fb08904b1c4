"""What a request may say about failures, and what then happens: `fail`, `recompute`, `retry_other`, and how often."""

import json
from dataclasses import replace
from typing import Any

import pytest

from common.errors import CorruptFrame, PeerLost, TwostrokeError
from common.sampling import FinishReason
from gateway.generation import Generation, OnFailure, Route, TokenDelta
from gateway.retry_budget import RetryBudget
from tests.support.fake_dispatcher import FakeDispatcher, tokens_of
from tests.support.fake_worker import fail_with
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_app import TestGateway, assert_refused
from tests.support.gateway_stack import GatewayStack, make_generation, running, wanted


def asking(on_failure: OnFailure | None = None, max_retries: int | None = None) -> Generation:
    return replace(make_generation(max_tokens=8), on_failure=on_failure, max_retries=max_retries)


def two_each(**policy: Any) -> GatewayStack:
    return GatewayStack([FakePrefill("p0"), FakePrefill("p1")], [FakeDecode("d0"), FakeDecode("d1")], **policy)


FAILURES = {
    "prefill dies": ("prefill", "computed", PeerLost),
    "prefill dies late": ("prefill", "first_token", PeerLost),
    "the transfer fails": ("decode", "pushing", CorruptFrame),
    "decode dies": ("decode", "token3", PeerLost),
}


def break_at(stack: GatewayStack, failure: str) -> type[TwostrokeError]:
    role, point, error = FAILURES[failure]
    worker = {"prefill": stack.prefill, "decode": stack.decode}[role][0]
    worker.points.actions[point] = fail_with(CorruptFrame("checksum")) if error is CorruptFrame else worker.die
    return error


@pytest.mark.parametrize("failure", FAILURES)
async def test_fail_ends_the_request_with_its_first_failure(failure: str) -> None:
    async with running(two_each()) as stack:
        error = break_at(stack, failure)
        outcome = Route()
        with pytest.raises(error) as raised:
            async for _ in stack.dispatcher.generate(asking(OnFailure.FAIL), outcome):
                pass
        assert outcome.fallback == ""
        assert stack.sample("twostroke_given_up_total", reason=raised.value.code, on_failure="fail") == 1
        assert not stack.prefill[1].requests
        assert not stack.decode[1].requests


@pytest.mark.parametrize(
    ("failure", "fallback"),
    [
        ("prefill dies", "prefill_lost"),
        ("prefill dies late", "prefill_lost"),
        ("the transfer fails", "transfer_failed"),
        ("decode dies", "decode_lost"),
    ],
)
async def test_recompute_never_asks_another_prefill_worker(failure: str, fallback: str) -> None:
    async with running(two_each()) as stack:
        break_at(stack, failure)
        outcome = await stack.run(asking(OnFailure.RECOMPUTE))
        assert outcome.token_ids == wanted(asking())
        assert outcome.route.fallback == fallback
        assert not stack.prefill[1].requests
        assert stack.sample("twostroke_fallbacks_total", reason=fallback) == 1


async def test_retry_other_asks_another_prefill_worker() -> None:
    async with running(two_each(on_failure=OnFailure.FAIL)) as stack:
        break_at(stack, "prefill dies")
        outcome = await stack.run(asking(OnFailure.RETRY_OTHER))
        assert outcome.token_ids == wanted(asking())
        assert (outcome.route.fallback, outcome.route.prefill_worker) == ("prefill_retried", "p1")


async def test_the_gateway_s_own_policy_is_that_of_requests_that_do_not_say() -> None:
    async with running(two_each(on_failure=OnFailure.FAIL)) as stack:
        break_at(stack, "prefill dies")
        with pytest.raises(PeerLost):
            await stack.run(asking())


async def test_a_request_s_own_retries() -> None:
    async with running(two_each()) as stack:
        break_at(stack, "prefill dies")
        with pytest.raises(PeerLost):
            await stack.run(asking(max_retries=0))
    async with running(two_each(max_retries=0)) as stack:
        break_at(stack, "prefill dies")
        assert (await stack.run(asking(max_retries=1))).token_ids == wanted(asking())


async def test_retries_of_all_generations_together_are_bounded() -> None:
    """Two workers die, one retry is there: the second generation hears of its own failure at once."""
    async with running(two_each(retry_ratio=0.0, retry_reserve=1)) as stack:
        break_at(stack, "prefill dies")
        await stack.run(asking())
        stack.prefill[1].points.actions["computed"] = stack.prefill[1].die
        with pytest.raises(PeerLost):
            await stack.run(asking())
        assert stack.sample("twostroke_given_up_total", reason="peer_lost", on_failure="retry_other") == 1


def test_every_generation_earns_a_part_of_a_retry_up_to_the_reserve() -> None:
    budget = RetryBudget(0.25, 2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(3):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]
    for _ in range(100):
        budget.earn()
    assert budget.num_left == 2


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize("in_header", [True, False])
async def test_the_options_reach_the_dispatcher(endpoint: str, in_header: bool) -> None:
    gateway = TestGateway()
    headers = {"x-twostroke-on-failure": "fail", "x-twostroke-max-retries": "1"}
    fields = {"on_failure": "fail", "max_retries": 1}
    ask = getattr(gateway, endpoint)
    response = await (ask(headers=headers) if in_header else ask(**fields))
    assert response.status_code == 200
    [generation] = gateway.dispatcher.generations
    assert (generation.on_failure, generation.max_retries) == (OnFailure.FAIL, 1)
    [root] = [span for span in gateway.spans.get_finished_spans() if span.name == "gateway.request"]
    assert root.attributes is not None
    assert root.attributes["twostroke.on_failure"] == "fail"


@pytest.mark.parametrize(
    ("headers", "fields", "param", "part"),
    [
        ({"x-twostroke-on-failure": "Fail"}, {}, "x-twostroke-on-failure", "'Fail'; allowed: fail, recompute"),
        ({"x-twostroke-on-failure": ""}, {}, "x-twostroke-on-failure", "''"),
        ({"x-twostroke-max-retries": "-1"}, {}, "x-twostroke-max-retries", "'-1'"),
        ({"x-twostroke-max-retries": "1.0"}, {}, "x-twostroke-max-retries", "'1.0'"),
        ({"x-twostroke-max-retries": "9" * 5000}, {}, "x-twostroke-max-retries", "'999"),
        ({"x-twostroke-max-retries": "3"}, {}, "max_retries", "max_retries is 3; this gateway allows 2"),
        ({}, {"max_retries": 3}, "max_retries", "max_retries is 3; this gateway allows 2"),
        ({}, {"max_retries": -1}, "max_retries", "max_retries is -1"),
        ({}, {"max_retries": "1"}, "max_retries", "'1'"),
        ({}, {"on_failure": "retry"}, "on_failure", "'retry'"),
        ({}, {"on_failure": 1}, "on_failure", "1"),
        ({"x-twostroke-on-failure": "fail"}, {"on_failure": "recompute"}, "on_failure", "send one"),
        ({"x-twostroke-max-retries": "0"}, {"max_retries": 1}, "max_retries", "send one"),
    ],
)
async def test_wrong_options_are_refused_with_their_value(
    headers: dict[str, str], fields: dict[str, Any], param: str, part: str
) -> None:
    gateway = TestGateway()
    assert_refused(await gateway.complete(headers=headers, **fields), 400, "invalid_value", param, part)
    assert not gateway.dispatcher.generations


async def test_what_was_said_twice_alike_is_taken() -> None:
    response = await TestGateway().complete(headers={"x-twostroke-max-retries": "1"}, max_retries=1)
    assert response.status_code == 200


class FallsBack(FakeDispatcher):
    """Leaves the planned way before its second delta."""

    def _fill_in(self, generation: Generation, route: Route) -> None:
        if generation.times.first_token:
            self.route.fallback = "decode_lost"
        super()._fill_in(generation, route)


def two_deltas(_: Generation) -> list[TokenDelta]:
    return [TokenDelta(tokens_of([20])), TokenDelta(tokens_of([21]), FinishReason.LENGTH)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_after_the_head_was_sent_is_told_in_the_stream(stream: bool) -> None:
    gateway = TestGateway()
    dispatcher = FallsBack(two_deltas)
    gateway.dispatcher.generate = dispatcher.generate  # type: ignore[method-assign]
    response = await gateway.complete(stream=stream)
    if not stream:
        assert response.headers["x-twostroke-fallback"] == "decode_lost"
        return
    assert "x-twostroke-fallback" not in response.headers
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert [event for event in events if event.startswith(":")] == [": x-twostroke-fallback: decode_lost; choice=0"]
    assert len([json.loads(event[6:]) for event in events[:-1] if event.startswith("data: ")]) >= 2


async def test_an_error_tells_what_was_tried_before_it() -> None:
    gateway = TestGateway(lambda _: [TokenDelta(tokens_of([20])), PeerLost("gone")])
    gateway.dispatcher.route.fallback = "prefill_retried"
    response = await gateway.complete()
    assert response.status_code == 502
    assert response.headers["x-twostroke-fallback"] == "prefill_retried"
