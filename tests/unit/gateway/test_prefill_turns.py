"""A queue before prefill holds nothing of decode: prompts wait in the gateway until prefill is about to begin."""

import asyncio

import pytest

from common.errors import NoRoom
from gateway.generation import Route
from tests.support.fake_worker import fail_with
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, PROMPT, GatewayStack, make_generation, running, wanted


class Gate:
    """Prefill computes nothing until it opens."""

    def __init__(self, prefill: FakePrefill) -> None:
        self._opened = asyncio.Event()
        prefill.points.actions["computed"] = self._opened.wait  # type: ignore[assignment]
        self.open = self._opened.set


def one_each(window_tokens: int) -> GatewayStack:
    return GatewayStack([FakePrefill("p0")], [FakeDecode("d0")], prefill_window_tokens=window_tokens)


async def until_waiting(stack: GatewayStack, num_generations: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while stack.sample("twostroke_waiting_generations") < num_generations:
            await asyncio.sleep(0)


async def test_only_prompts_within_the_window_have_room_on_decode() -> None:
    """Two prompts fill the window of 70 tokens; three more wait, and decode has promised them nothing."""
    async with running(one_each(window_tokens=2 * len(PROMPT) - 10)) as stack:
        gate = Gate(stack.prefill[0])
        generation = make_generation()
        tasks = [asyncio.create_task(stack.run(generation)) for _ in range(5)]
        await until_waiting(stack, 3)
        async with asyncio.timeout(PATIENCE_S):
            while len(stack.prefill[0].requests) < 2:
                await asyncio.sleep(0)
        assert len(stack.decode[0].reservations) == 2
        gate.open()
        for outcome in await asyncio.gather(*tasks):
            assert outcome.token_ids == wanted(generation)
            assert outcome.route.fallback == ""
        assert len(stack.prefill[0].requests) == 5
        assert stack.sample("twostroke_waiting_generations") == 0


async def test_those_who_wait_go_in_the_order_in_which_they_came() -> None:
    async with running(one_each(window_tokens=1)) as stack:
        gate = Gate(stack.prefill[0])
        prompts = [(*PROMPT, number) for number in range(4)]
        tasks = []
        for number, prompt in enumerate(prompts):
            tasks.append(asyncio.create_task(stack.run(make_generation(prompt))))
            await until_waiting(stack, number)
        gate.open()
        await asyncio.gather(*tasks)
        assert [tuple(request.token_ids) for request in stack.prefill[0].requests] == prompts


async def test_one_that_leaves_while_it_waits_holds_nobody_up() -> None:
    async with running(one_each(window_tokens=1)) as stack:
        gate = Gate(stack.prefill[0])
        tasks = [asyncio.create_task(stack.run(make_generation())) for _ in range(3)]
        await until_waiting(stack, 2)
        tasks[1].cancel()
        gate.open()
        first, left, last = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(left, asyncio.CancelledError)
        assert not isinstance(first, BaseException)
        assert not isinstance(last, BaseException)


async def test_a_prefill_that_dies_keeps_nobody_waiting() -> None:
    async with running(one_each(window_tokens=1)) as stack:
        tasks = [asyncio.create_task(stack.run(make_generation())) for _ in range(3)]
        stack.prefill[0].points.actions["computed"] = stack.prefill[0].die
        outcomes = await asyncio.gather(*tasks)
        assert {outcome.route.fallback for outcome in outcomes} <= {"prefill_lost", "no_prefill_worker"}
        assert all(outcome.token_ids == wanted(make_generation()) for outcome in outcomes)


async def test_a_full_decode_refuses_before_prefill_has_begun() -> None:
    async with running(one_each(window_tokens=1)) as stack:
        stack.decode[0].points.actions["reserve"] = fail_with(NoRoom("full", retry_after_s=3.0))
        for _ in range(2):
            with pytest.raises(NoRoom, match="full") as caught:
                async for _ in stack.dispatcher.generate(make_generation(), Route()):
                    pass
            assert caught.value.retry_after_s == 3.0
        assert not stack.prefill[0].requests
