"""Every worker of a kind has failed a generation, or refused it: those that are well are used again, and the client
sees the same tokens; the retries bound it."""

from dataclasses import replace

import pytest

from common.errors import CorruptFrame, Draining, NoRoom, PeerLost, TransferError, TwostrokeError
from gateway.generation import OnFailure
from tests.support.fake_worker import FakeWorker, fail_with
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, GatewayStack, Outcome, make_generation, running, wanted


def stack_of(num_prefill: int, num_decode: int, **policy: bool | int | float) -> GatewayStack:
    return GatewayStack(
        [FakePrefill(f"p{number}") for number in range(num_prefill)],
        [FakeDecode(f"d{number}") for number in range(num_decode)],
        reconnect_wait_s=PATIENCE_S,
        **policy,
    )


def fails(worker: FakeWorker, point: str, *errors: TwostrokeError) -> None:
    """Once with each error, then no more."""
    left = list(errors)

    async def fail() -> None:
        if left:
            raise left.pop(0)

    worker.points.actions[point] = fail


async def check_answer(stack: GatewayStack) -> Outcome:
    outcome = await stack.run(make_generation(max_tokens=8))
    assert outcome.token_ids == wanted(make_generation(max_tokens=8))
    return outcome


@pytest.mark.parametrize("point", ["generate", "token3"])
async def test_a_failed_transfer_while_the_other_decode_worker_is_down(point: str) -> None:
    async with running(stack_of(0, 2)) as stack:
        await stack.decode[1].stop()
        await stack.until_lost(stack.decode[1])
        fails(stack.decode[0], point, TransferError("a token was lost"))
        outcome = await check_answer(stack)
        assert outcome.route.decode_worker == "d0"
        assert [request.generation for request in stack.decode[0].requests] == [1, 2]


async def test_one_that_fails_again_is_waited_out_and_the_other_that_comes_back_takes_over() -> None:
    async with running(stack_of(0, 2)) as stack:
        other = stack.decode[1]
        await other.stop()
        await stack.until_lost(other)
        errors: list[TwostrokeError] = [TransferError("a token was lost"), TransferError("another one")]

        async def fail_and_come_back() -> None:
            if len(errors) == 1:
                await other.start()
            if errors:
                raise errors.pop()

        stack.decode[0].points.actions["token3"] = fail_and_come_back
        outcome = await check_answer(stack)
        assert outcome.route.decode_worker == "d1"
        assert len(stack.decode[0].requests) == 2


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_both_decode_workers_have_failed_and_are_well(num_prefill: int) -> None:
    """The last resort computes alone: a hand-off is one more way to fail."""
    async with running(stack_of(num_prefill, 2)) as stack:
        for decode in stack.decode:
            fails(decode, "reserve" if num_prefill else "generate", TransferError("not now"))
        outcome = await check_answer(stack)
        assert outcome.route.prefill_worker == ""
        assert outcome.route.fallback == ("decode_retried,decode_lost" if num_prefill else "decode_retried")


async def test_one_has_failed_and_the_other_is_full() -> None:
    async with running(stack_of(1, 2)) as stack:
        fails(stack.decode[0], "reserve", TransferError("not now"))
        stack.decode[1].points.actions["reserve"] = fail_with(NoRoom("full"))
        assert (await check_answer(stack)).route.decode_worker == "d0"


async def test_mid_stream_a_full_worker_is_asked_again_after_its_pause() -> None:
    async with running(stack_of(0, 2)) as stack:
        stack.decode[0].points.actions["token3"] = stack.decode[0].die
        fails(stack.decode[1], "generate", NoRoom("full", retry_after_s=0.01), NoRoom("full", retry_after_s=0.01))
        assert (await check_answer(stack)).route.decode_worker == "d1"
        assert len(stack.decode[1].requests) == 3


@pytest.mark.parametrize("refusal", [NoRoom("queue is full"), Draining("leaving")])
async def test_one_prefill_worker_has_failed_and_the_other_refuses(refusal: TwostrokeError) -> None:
    """Without room anywhere else nothing is computed on decode; nor under `strict`."""
    async with running(stack_of(2, 1, strict=True)) as stack:
        fails(stack.prefill[0], "computed", CorruptFrame("checksum"))
        stack.prefill[1].points.actions["run"] = fail_with(refusal)
        outcome = await check_answer(stack)
        assert (outcome.route.prefill_worker, outcome.route.fallback) == ("p0", "prefill_retried")


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_strict_uses_prefill_workers_again_while_retries_are_left(num_prefill: int) -> None:
    async with running(stack_of(num_prefill, 1, strict=True)) as stack:
        for prefill in stack.prefill:
            fails(prefill, "computed", CorruptFrame("checksum"))
        assert (await check_answer(stack)).route.fallback == "prefill_retried"
        assert stack.prefill[0].points.num_reached["computed"] == 2


async def test_strict_goes_on_to_a_third_prefill_worker() -> None:
    async with running(stack_of(3, 1, strict=True)) as stack:
        for prefill in stack.prefill[:2]:
            prefill.points.actions["computed"] = prefill.die
        assert (await check_answer(stack)).route.prefill_worker == "p2"


async def test_the_retries_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.avoided.UNNOTICED_S", 0.001)
    async with running(stack_of(0, 2, max_retries=3)) as stack:
        for decode in stack.decode:
            decode.points.actions["generate"] = fail_with(CorruptFrame("broken for ever"))
        with pytest.raises(CorruptFrame):
            await stack.run(make_generation())
        assert sum(len(decode.requests) for decode in stack.decode) == 4


async def test_fail_is_the_end_with_whoever_is_left() -> None:
    async with running(stack_of(0, 2)) as stack:
        fails(stack.decode[0], "generate", TransferError("not now"))
        with pytest.raises(TransferError):
            await stack.run(replace(make_generation(), on_failure=OnFailure.FAIL))
        assert not stack.decode[1].requests


async def test_a_lost_worker_that_stays_ready_was_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where prefill cannot reach decode, and the gateway can."""
    monkeypatch.setattr("gateway.avoided.UNNOTICED_S", 0.01)
    async with running(stack_of(1, 1)) as stack:
        lost = fail_with(PeerLost("decode worker d0 cannot be reached"))
        stack.prefill[0].points.actions["computed"] = lost
        outcome = await check_answer(stack)
        assert outcome.route.fallback == "decode_retried,decode_lost"
        assert (outcome.route.prefill_worker, outcome.route.decode_worker) == ("", "d0")
        assert len(stack.prefill[0].requests) == 1
