"""A decode worker dies mid-stream: the generation goes where most of its blocks are, with the same tokens."""

import pytest

from gateway.generation import Route
from gateway.placement import Demand, Placement, Role, WorkerView, place
from tests.support.fake_worker import LAYOUT, FakeWorker, hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PROMPT, GatewayStack, make_generation, running, wanted

POSITION = 3
NUM_PROMPT_BLOCKS = len(PROMPT) // LAYOUT.block_size


def stack_of(num_prefill: int, num_decode: int, **policy: bool) -> GatewayStack:
    stack = GatewayStack(
        [FakePrefill(f"p{number}") for number in range(num_prefill)],
        [FakeDecode(f"d{number}") for number in range(num_decode)],
        **policy,
    )
    dying = stack.decode[0]
    dying.points.actions[f"token{POSITION}"] = dying.die
    return stack


def holds(worker: FakeWorker, num_blocks: int) -> None:
    worker.num_held = num_blocks
    if isinstance(worker, FakePrefill | FakeDecode):
        worker.num_cached_tokens = num_blocks * LAYOUT.block_size


async def check_answer(stack: GatewayStack, fallback: str) -> Route:
    generation = make_generation(max_tokens=8)
    outcome = await stack.run(generation)
    assert outcome.token_ids == wanted(generation)
    assert outcome.route.fallback == fallback
    assert stack.sample("twostroke_fallbacks_total", reason=fallback) == 1
    return outcome.route


def replaced(stack: GatewayStack) -> tuple[float, float]:
    name = "twostroke_replaced_tokens_total"
    return stack.sample(name, how="reused"), stack.sample(name, how="computed")


@pytest.mark.parametrize("strict", [False, True])
async def test_a_prefill_worker_that_has_the_prompt_computes_what_came_after_it(strict: bool) -> None:
    async with running(stack_of(2, 2, strict=strict)) as stack:
        holds(stack.prefill[1], NUM_PROMPT_BLOCKS)
        route = await check_answer(stack, "decode_retried")
        assert (route.prefill_worker, route.decode_worker) == ("p1", "d1")
        delivered = wanted(make_generation(max_tokens=8))[:POSITION]
        [prefill_request] = stack.prefill[1].requests
        [decode_request] = stack.decode[1].requests
        assert list(prefill_request.output_token_ids) == list(decode_request.output_token_ids) == delivered
        assert prefill_request.ticket == decode_request.ticket != b""
        reused = NUM_PROMPT_BLOCKS * LAYOUT.block_size
        assert replaced(stack) == (reused, len(PROMPT) + POSITION - reused)


async def test_a_decode_worker_that_holds_as_much_computes_it_itself() -> None:
    async with running(stack_of(1, 3)) as stack:
        for worker in (stack.prefill[0], stack.decode[2]):
            holds(worker, NUM_PROMPT_BLOCKS)
        route = await check_answer(stack, "decode_lost")
        assert (route.prefill_worker, route.decode_worker) == ("", "d2")
        reused = NUM_PROMPT_BLOCKS * LAYOUT.block_size
        assert replaced(stack) == (reused, len(PROMPT) + POSITION - reused)


async def test_where_nobody_holds_anything_decode_computes_it_all() -> None:
    async with running(stack_of(1, 2)) as stack:
        route = await check_answer(stack, "decode_lost")
        assert route.decode_worker == "d1"
        assert replaced(stack) == (0, len(PROMPT) + POSITION)


async def test_a_worker_that_does_not_answer_is_taken_to_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.held_blocks.ASK_TIMEOUT_S", 0.02)
    async with running(stack_of(1, 3)) as stack:
        holds(stack.decode[1], NUM_PROMPT_BLOCKS)
        stack.decode[1].points.actions["count_held"] = hang
        holds(stack.decode[2], 1)
        route = await check_answer(stack, "decode_lost")
        assert route.decode_worker == "d2"


async def test_prefill_dies_too_on_the_way_back() -> None:
    async with running(stack_of(1, 2)) as stack:
        prefill = stack.prefill[0]
        holds(prefill, NUM_PROMPT_BLOCKS)

        async def die_the_second_time() -> None:
            if len(prefill.requests) == 2:
                await prefill.die()

        prefill.points.actions["computed"] = die_the_second_time
        generation = make_generation(max_tokens=8)
        outcome = await stack.run(generation)
        assert outcome.token_ids == wanted(generation)
        assert outcome.route.fallback == "decode_retried,prefill_lost"
        assert outcome.route.decode_worker == "d1"


def view(name: str, role: Role, *, queued_tokens: int = 0) -> WorkerView:
    return WorkerView(name, name, role, 1, True, False, 100, 100, queued_tokens, 0)


def moved(held: dict[str, int], *, strict: bool = False, queued_at_prefill: int = 0) -> Placement:
    workers = [view("p", Role.PREFILL, queued_tokens=queued_at_prefill), view("a", Role.DECODE), view("b", Role.DECODE)]
    return place(workers, Demand(100, 16, held), prefill_wanted=True, strict=strict, is_move=True)


def test_a_move_goes_where_the_least_is_left_to_compute() -> None:
    assert moved({"p": 6}).prefill is not None
    assert moved({"p": 6}, queued_at_prefill=500).prefill is None
    assert (moved({"p": 5, "b": 6}).prefill, moved({"p": 5, "b": 6}).decode.worker_id) == (None, "b")
    assert moved({}).prefill is None
    assert moved({}, strict=True).prefill is not None
