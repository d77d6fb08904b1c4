"""Whatever ends a generation, at whatever stage: both sides are released, and nothing is left here."""

import asyncio
import random

import pytest

from gateway.generation import Route
from tests.support.fake_worker import hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, GatewayStack, make_generation, running, wanted


def one_each() -> GatewayStack:
    return GatewayStack([FakePrefill("p0")], [FakeDecode("d0")])


CLOSE_POINTS = [
    ("decode", "reserve"),
    ("decode", "reserved"),
    ("decode", "generate"),
    ("prefill", "run"),
    ("prefill", "computed"),
    ("prefill", "first_token"),
    ("decode", "pushing"),
    ("decode", "committed"),
    ("decode", "token1"),
    ("decode", "token3"),
    ("decode", "tokens_sent"),
    ("prefill", "handed_off"),
]


@pytest.mark.parametrize(("side", "point"), CLOSE_POINTS)
async def test_cancelled_at_each_stage(side: str, point: str) -> None:
    async with running(one_each()) as stack:
        worker = (stack.prefill if side == "prefill" else stack.decode)[0]
        worker.points.actions[point] = hang
        task = asyncio.create_task(stack.run(make_generation()))
        async with asyncio.timeout(PATIENCE_S):
            await worker.points.reached(point)
        task.cancel()
        await asyncio.wait({task})
        await stack.check_integrity()


@pytest.mark.parametrize("num_deltas", [1, 2, 5])
async def test_closed_by_the_caller(num_deltas: int) -> None:
    async with running(one_each()) as stack:
        stream = stack.dispatcher.generate(make_generation(), Route())
        for _ in range(num_deltas):
            await anext(stream)
        await stream.aclose()
        await stack.dispatcher.settled()
        assert len(stack.prefill[0].released) == len(stack.decode[0].released) == 1


async def test_release_starts_before_the_last_delta_is_taken() -> None:
    """A caller that dawdles over the last token holds nothing on the workers."""
    async with running(one_each()) as stack:
        stream = stack.dispatcher.generate(make_generation(max_tokens=2), Route())
        await anext(stream)
        last = await anext(stream)
        assert last.finish_reason is not None
        await stack.dispatcher.settled()
        stack.decode[0].check_integrity()
        await stream.aclose()


async def test_random_races_end_at_the_baseline() -> None:
    """Cancels and finishes in every order; nothing is left on any side, and no task of ours."""
    chance = random.Random(11)
    stack = GatewayStack([FakePrefill("p0"), FakePrefill("p1")], [FakeDecode("d0"), FakeDecode("d1")])
    async with running(stack):
        num_tasks = len(asyncio.all_tasks())

        async def client(number: int) -> None:
            generation = make_generation(seed=number, max_tokens=chance.randint(1, 4))
            task = asyncio.create_task(stack.run(generation))
            for _ in range(chance.choice((0, 1, 3, 10, 30, 100, 300))):
                await asyncio.sleep(0)
            if chance.random() < 0.7:
                task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                assert task.result().token_ids == wanted(generation)

        for start in range(0, 500, 25):
            await asyncio.gather(*(client(number) for number in range(start, start + 25)))
        await stack.check_integrity()
        assert len(asyncio.all_tasks()) <= num_tasks + 8, "the servers' own tasks come and go; ours do not stay"
