"""Placement's order of preference, one case each."""

import pytest

from common.errors import NoWorker
from gateway.placement import Demand, PlacementReason, Role, WorkerView, place


def worker(worker_id: str, role: Role = Role.DECODE, **changes: int | bool) -> WorkerView:
    values: dict[str, int | bool] = {
        "registration": 1,
        "is_ready": True,
        "is_draining": False,
        "total_blocks": 100,
        "free_blocks": 100,
        "queued_tokens": 0,
        "num_sequences": 0,
    }
    return WorkerView(worker_id=worker_id, address=f"{worker_id}:1", role=role, **(values | changes))  # type: ignore[arg-type]


def decode_chosen(*workers: WorkerView, num_tokens: int = 320, held: dict[str, int] | None = None) -> str:
    demand = Demand(num_tokens, 16, held or {})
    return place([worker("p", Role.PREFILL), *workers], demand, prefill_wanted=True, strict=False).decode.worker_id


def test_room_comes_before_load() -> None:
    crowded = worker("a", free_blocks=10, total_blocks=1000)
    roomy = worker("b", free_blocks=30, total_blocks=100_000)
    assert decode_chosen(crowded, roomy) == "b"


def test_held_blocks_need_no_room() -> None:
    assert decode_chosen(worker("a", free_blocks=2, total_blocks=2), worker("b", free_blocks=1), held={"a": 20}) == "a"


def test_least_loaded_decode() -> None:
    assert decode_chosen(worker("a", free_blocks=60), worker("b", free_blocks=80)) == "b"


def test_held_blocks_decide_between_equals() -> None:
    assert decode_chosen(worker("a"), worker("b"), held={"b": 3}) == "b"


def test_nobody_has_room_still_asks_the_least_loaded() -> None:
    """Statuses are late; the worker's own refusal is the one that counts."""
    assert decode_chosen(worker("a", free_blocks=1), worker("b", free_blocks=2)) == "b"


@pytest.mark.parametrize(("queued", "expected"), [(100, "a"), (400, "b")])
def test_a_queue_can_outweigh_a_prefix(queued: int, expected: str) -> None:
    workers = [worker("a", Role.PREFILL, queued_tokens=queued), worker("b", Role.PREFILL), worker("d")]
    placement = place(workers, Demand(320, 16, {"a": 20}), prefill_wanted=True, strict=False)
    assert placement.prefill is not None
    assert placement.prefill.worker_id == expected
    assert placement.reason is (PlacementReason.LONGEST_PREFIX if expected == "a" else PlacementReason.LEAST_LOAD)


def test_alone_counts_the_running_sequences() -> None:
    workers = [worker("a", num_sequences=20), worker("b")]
    demand = Demand(320, 16, {"a": 20})
    assert place(workers, demand, prefill_wanted=False, strict=False).decode.worker_id == "b"


def test_no_decode_worker_is_named() -> None:
    with pytest.raises(NoWorker, match="no decode worker"):
        place([worker("d", is_draining=True)], Demand(1, 16, {}), prefill_wanted=False, strict=False)


def test_strict_without_prefill_is_named() -> None:
    with pytest.raises(NoWorker, match="strict"):
        place([worker("d")], Demand(1, 16, {}), prefill_wanted=True, strict=True)
