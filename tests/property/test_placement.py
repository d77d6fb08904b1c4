"""Laws of placement, over any set of workers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import NoWorker
from gateway.placement import Demand, Fallback, Placement, PlacementReason, Role, WorkerView, place

BLOCK_SIZE = 16


@st.composite
def views(draw: st.DrawFn) -> list[WorkerView]:
    workers = []
    for number in range(draw(st.integers(0, 8))):
        total = draw(st.integers(0, 200))
        workers.append(
            WorkerView(
                worker_id=f"w{number}",
                address=f"10.0.0.{number}:1",
                role=draw(st.sampled_from(Role)),
                registration=1,
                is_ready=draw(st.booleans()),
                is_draining=draw(st.booleans()),
                total_blocks=total,
                free_blocks=draw(st.integers(0, total)),
                queued_tokens=draw(st.integers(0, 5000)),
                num_sequences=draw(st.integers(0, 64)),
            )
        )
    return workers


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    num_tokens = draw(st.integers(1, 3000))
    held = st.integers(0, num_tokens // BLOCK_SIZE)
    return Demand(num_tokens, BLOCK_SIZE, draw(st.dictionaries(st.sampled_from([f"w{n}" for n in range(8)]), held)))


def try_place(workers: list[WorkerView], demand: Demand, prefill_wanted: bool, strict: bool) -> Placement | None:
    try:
        return place(workers, demand, prefill_wanted=prefill_wanted, strict=strict)
    except NoWorker:
        return None


@given(views(), demands(), st.booleans(), st.booleans())
def test_only_workers_that_take_work(
    workers: list[WorkerView], demand: Demand, prefill_wanted: bool, strict: bool
) -> None:
    placement = try_place(workers, demand, prefill_wanted, strict)
    able = {role: [view for view in workers if view.role is role and view.takes_work] for role in Role}
    if placement is None:
        assert not able[Role.DECODE] or (prefill_wanted and strict and not able[Role.PREFILL])
        return
    assert placement.decode in able[Role.DECODE]
    assert placement.prefill is None or placement.prefill in able[Role.PREFILL]
    assert (placement.prefill is not None) == bool(prefill_wanted and able[Role.PREFILL])
    fell_back = prefill_wanted and placement.prefill is None
    assert placement.fallback is (Fallback.NO_PREFILL_WORKER if fell_back else None)


@given(views(), demands(), st.booleans(), st.randoms(use_true_random=False))
def test_the_same_choice_in_any_order(
    workers: list[WorkerView], demand: Demand, prefill_wanted: bool, chance: random.Random
) -> None:
    shuffled = list(workers)
    chance.shuffle(shuffled)
    assert try_place(workers, demand, prefill_wanted, False) == try_place(shuffled, demand, prefill_wanted, False)


def equal_workers(role: Role, count: int, queued_tokens: int = 0) -> list[WorkerView]:
    return [
        WorkerView(f"{role}{n}", f"10.0.0.{n}:{role}", role, 1, True, False, 4096, 4096, queued_tokens, 0)
        for n in range(count)
    ]


@given(st.integers(1, 8), st.integers(16, 3000), st.integers(0, 4000), st.data())
def test_the_fullest_prefix_wins_at_equal_load(count: int, num_tokens: int, queued: int, data: st.DataObject) -> None:
    workers = [*equal_workers(Role.PREFILL, count, queued), *equal_workers(Role.DECODE, 1)]
    held = {
        view.worker_id: data.draw(st.integers(0, num_tokens // BLOCK_SIZE))
        for view in workers
        if view.role is Role.PREFILL
    }
    placement = place(workers, Demand(num_tokens, BLOCK_SIZE, held), prefill_wanted=True, strict=False)
    assert placement.prefill is not None
    # The last token is always computed, so holding the block it is in gains nothing over holding all before it.
    useful = {worker_id: min(num_tokens - 1, blocks * BLOCK_SIZE) for worker_id, blocks in held.items()}
    assert useful[placement.prefill.worker_id] == max(useful.values())
    if placement.reason is PlacementReason.LONGEST_PREFIX:
        assert held[placement.prefill.worker_id] > 0


@settings(deadline=None, max_examples=40)  # each example places many requests
@given(st.integers(1, 6), st.integers(1, 400), st.booleans())
def test_no_worker_starves(count: int, num_tokens: int, prefill_wanted: bool) -> None:
    """One worker holds the whole prompt. The others still get work as its load rises."""
    workers = [*equal_workers(Role.PREFILL, count if prefill_wanted else 0), *equal_workers(Role.DECODE, count)]
    favourite = "prefill0" if prefill_wanted else "decode0"
    demand = Demand(num_tokens, BLOCK_SIZE, {favourite: num_tokens // BLOCK_SIZE})
    chosen: set[str] = set()
    for _ in range((num_tokens + 64) * count):
        placement = place(workers, demand, prefill_wanted=prefill_wanted, strict=False)
        chosen |= {view.worker_id for view in (placement.prefill, placement.decode) if view}
        workers = [loaded(view, placement, demand) for view in workers]
        if len(chosen) == len(workers):
            return
    pytest.fail(f"only {sorted(chosen)} of {len(workers)} workers were chosen")


def loaded(view: WorkerView, placement: Placement, demand: Demand) -> WorkerView:
    """`view` with the placed work on it."""
    computes = view in (placement.prefill, None if placement.prefill else placement.decode)
    return WorkerView(
        view.worker_id,
        view.address,
        view.role,
        view.registration,
        view.is_ready,
        view.is_draining,
        view.total_blocks,
        max(0, view.free_blocks - (1 if view == placement.decode else 0)),
        view.queued_tokens + (demand.uncached_tokens(view) if computes else 0),
        view.num_sequences + (1 if view in (placement.prefill, placement.decode) else 0),
    )
