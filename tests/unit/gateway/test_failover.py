"""Workers that fail during a generation: the client sees the same tokens, none lost or repeated, or one clear error."""

import asyncio

import pytest

from common.errors import CorruptFrame, LeaseExpired, NoWorker, PeerLost, TransferError
from gateway.generation import Route
from tests.support.fake_worker import FakeWorker, fail_with, hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, GatewayStack, make_generation, running, wanted


def stack_of(num_prefill: int, num_decode: int, **policy: bool | int | float) -> GatewayStack:
    return GatewayStack(
        [FakePrefill(f"p{number}") for number in range(num_prefill)],
        [FakeDecode(f"d{number}") for number in range(num_decode)],
        **policy,  # type: ignore[arg-type]
    )


def kill_at(worker: FakeWorker, point: str) -> None:
    worker.points.actions[point] = worker.die


async def check_answer(stack: GatewayStack, fallback: str) -> Route:
    """A whole answer, by way of `fallback`, which is in the route and in the metric."""
    generation = make_generation(max_tokens=8)
    outcome = await stack.run(generation)
    assert outcome.token_ids == wanted(generation)
    assert outcome.finish_reason == "length"
    assert outcome.route.fallback == fallback
    for reason in fallback.split(",") if fallback else ():
        assert stack.sample("twostroke_fallbacks_total", reason=reason) >= 1
    return outcome.route


@pytest.mark.parametrize("point", ["run", "computed"])
async def test_prefill_dies_before_the_first_token(point: str) -> None:
    async with running(stack_of(2, 1)) as stack:
        kill_at(stack.prefill[0], point)
        route = await check_answer(stack, "prefill_retried")
        assert route.prefill_worker == "p1"
        [request] = stack.prefill[1].requests
        assert request.generation == 2
        assert request.transfer_id == stack.prefill[0].requests[0].transfer_id


async def test_the_only_prefill_dies_before_the_first_token() -> None:
    async with running(stack_of(1, 1)) as stack:
        kill_at(stack.prefill[0], "computed")
        route = await check_answer(stack, "prefill_lost")
        assert (route.prefill_worker, route.decode_worker, route.reason) == ("", "d0", "decode_alone")
        assert stack.decode[0].requests[-1].ticket == b""
        assert list(stack.decode[0].requests[-1].output_token_ids) == []


async def test_both_prefills_die_before_the_first_token() -> None:
    async with running(stack_of(2, 1)) as stack:
        for prefill in stack.prefill:
            kill_at(prefill, "computed")
        await check_answer(stack, "prefill_retried,prefill_lost")


async def test_prefill_dies_after_the_first_token() -> None:
    async with running(stack_of(2, 1)) as stack:
        kill_at(stack.prefill[0], "first_token")
        await check_answer(stack, "prefill_lost")
        assert list(stack.decode[0].requests[-1].output_token_ids) == wanted(make_generation())[:1]


async def test_prefill_dies_after_the_hand_off() -> None:
    async with running(stack_of(1, 1)) as stack:
        kill_at(stack.prefill[0], "handed_off")
        await check_answer(stack, "")
        assert len(stack.decode[0].requests) == 1


async def test_transfer_fails_before_the_first_token() -> None:
    async with running(stack_of(2, 1)) as stack:
        stack.prefill[0].points.actions["computed"] = fail_with(CorruptFrame("checksum"))
        route = await check_answer(stack, "prefill_retried")
        assert route.prefill_worker == "p1"


async def test_transfer_fails_after_the_first_token() -> None:
    async with running(stack_of(1, 1)) as stack:
        stack.decode[0].points.actions["pushing"] = fail_with(CorruptFrame("checksum"))
        await check_answer(stack, "transfer_failed")


async def test_blocks_that_were_sent_again_are_told_once() -> None:
    async with running(stack_of(1, 1)) as stack:
        stack.decode[0].num_refetched_blocks = 3
        await check_answer(stack, "blocks_refetched")
        assert stack.sample("twostroke_fallbacks_total", reason="blocks_refetched") == 1


async def test_lease_expires_on_decode() -> None:
    async with running(stack_of(1, 1)) as stack:
        stack.prefill[0].points.actions["computed"] = hang
        stack.decode[0].points.actions["generate"] = _once(LeaseExpired("nothing came"))
        await check_answer(stack, "transfer_failed")


async def test_decode_dies_at_the_reservation() -> None:
    async with running(stack_of(1, 2)) as stack:
        kill_at(stack.decode[0], "reserve")
        route = await check_answer(stack, "decode_retried")
        assert (route.prefill_worker, route.decode_worker) == ("p0", "d1")
        assert len(stack.prefill[0].requests) == 1


async def test_decode_dies_before_the_first_token() -> None:
    async with running(stack_of(1, 2)) as stack:
        stack.prefill[0].points.actions["computed"] = lambda: _die_when_open(stack)
        route = await check_answer(stack, "decode_retried")
        assert (route.prefill_worker, route.decode_worker) == ("p0", "d1")
        assert [request.generation for request in stack.prefill[0].requests] == [1, 2]


async def _die_when_open(stack: GatewayStack) -> None:
    if len(stack.prefill[0].requests) == 1:
        await stack.decode[0].points.reached("generate")
        await stack.decode[0].die()


async def test_decode_dies_during_the_transfer() -> None:
    """Prefill reports that its peer is lost; prefill itself is well and is not blamed."""
    async with running(stack_of(1, 2)) as stack:
        kill_at(stack.decode[0], "pushing")
        route = await check_answer(stack, "decode_lost")
        assert route.decode_worker == "d1"


@pytest.mark.parametrize("position", [1, 2, 5, 7])
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_decode_dies_mid_stream(num_prefill: int, position: int) -> None:
    async with running(stack_of(num_prefill, 2)) as stack:
        kill_at(stack.decode[0], f"token{position}")
        route = await check_answer(stack, "decode_lost")
        assert route.decode_worker == "d1"
        assert list(stack.decode[1].requests[0].output_token_ids) == wanted(make_generation(max_tokens=8))[:position]


async def test_the_first_token_of_decode_alone_is_retried() -> None:
    async with running(stack_of(0, 2, strict=True)) as stack:
        kill_at(stack.decode[0], "token0")
        await check_answer(stack, "decode_retried")


async def test_the_only_decode_comes_back() -> None:
    async with running(stack_of(1, 1, reconnect_wait_s=PATIENCE_S)) as stack:
        decode = stack.decode[0]
        kill_at(decode, "token3")
        answer = asyncio.create_task(check_answer(stack, "decode_lost"))
        async with asyncio.timeout(PATIENCE_S):
            await decode.points.reached("token3")
        await stack.until_lost(decode)
        del decode.points.actions["token3"]
        await decode.stop()
        await decode.start()
        await answer
        assert [request.generation for request in decode.requests] == [1, 2]


async def test_the_only_decode_stays_away() -> None:
    async with running(stack_of(1, 1, reconnect_wait_s=0.01)) as stack:
        kill_at(stack.decode[0], "token3")
        stream = stack.dispatcher.generate(make_generation(), Route())
        deltas = [await anext(stream) for _ in range(3)]
        with pytest.raises(PeerLost):
            await anext(stream)
        assert [token.token_id for delta in deltas for token in delta.tokens] == wanted(make_generation())[:3]


async def test_failures_are_bounded() -> None:
    async with running(stack_of(0, 3, max_retries=1)) as stack:
        for decode in stack.decode:
            kill_at(decode, "token2")
        with pytest.raises(PeerLost):
            await stack.run(make_generation())
        assert [len(decode.requests) for decode in stack.decode] == [1, 1, 0]


async def test_no_prefill_worker_falls_back() -> None:
    async with running(stack_of(1, 1)) as stack:
        await stack.prefill[0].stop()
        await stack.until_lost(stack.prefill[0])
        await check_answer(stack, "no_prefill_worker")


@pytest.mark.parametrize("point", ["computed", "first_token"])
async def test_strict_refuses_to_fall_back(point: str) -> None:
    async with running(stack_of(1, 1, strict=True)) as stack:
        kill_at(stack.prefill[0], point)
        with pytest.raises(PeerLost):
            await stack.run(make_generation())
        await stack.until_lost(stack.prefill[0])
        with pytest.raises(NoWorker, match="strict"):
            await stack.run(make_generation())
        assert len(stack.decode[0].requests) == 1


async def test_strict_allows_another_worker_on_the_same_way() -> None:
    async with running(stack_of(2, 1, strict=True)) as stack:
        kill_at(stack.prefill[0], "computed")
        await check_answer(stack, "prefill_retried")


async def test_prefill_ends_without_a_word() -> None:
    """A stream that ends well but says nothing is a failure too."""
    async with running(stack_of(1, 1)) as stack:
        stack.prefill[0].points.actions["computed"] = fail_with(TransferError("gone"))
        await check_answer(stack, "transfer_failed")


async def test_no_progress_is_a_loss() -> None:
    """The worker answers pings but neither steps nor sends."""
    async with running(stack_of(1, 1, progress_timeout_s=0.5)) as stack:
        stack.prefill[0].points.actions["computed"] = hang
        await check_answer(stack, "prefill_lost")


async def test_both_sides_die_and_the_stream_goes_on() -> None:
    async with running(stack_of(2, 3)) as stack:
        kill_at(stack.prefill[0], "computed")
        kill_at(stack.decode[0], "token2")
        route = await check_answer(stack, "prefill_retried,decode_lost")
        assert route.decode_worker == "d1"


async def test_cancelled_during_recovery() -> None:
    async with running(stack_of(1, 1, reconnect_wait_s=PATIENCE_S)) as stack:
        kill_at(stack.decode[0], "token2")
        task = asyncio.create_task(stack.run(make_generation()))
        await stack.until_lost(stack.decode[0])
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


def _once(error: TransferError) -> "_Once":
    return _Once(error)


class _Once:
    def __init__(self, error: TransferError) -> None:
        self._errors: list[TransferError] = [error]

    async def __call__(self) -> None:
        if self._errors:
            raise self._errors.pop()
