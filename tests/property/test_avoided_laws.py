"""Whom a generation avoids: one that failed comes last, and nobody who is alive is out of reach for long."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.errors import Cancelled, CorruptFrame, Draining, NoRoom, PeerLost, TwostrokeError, Unavailable
from gateway.avoided import REFUSAL_PAUSE_S, UNNOTICED_S, Avoided
from gateway.placement import Role, WorkerView

REFUSALS = (NoRoom("full"), NoRoom("full", retry_after_s=3.0), Draining("leaving"))
FAILURES = (PeerLost("gone"), CorruptFrame("checksum"), Unavailable("no"), Cancelled("by itself"))
LONGEST_PAUSE_S = max(UNNOTICED_S, REFUSAL_PAUSE_S, 3.0)
START_S = 1_000.0


def view(number: int, *, is_ready: bool = True, registration: int = 1) -> WorkerView:
    return WorkerView(f"d{number}", f"10.0.0.{number}:1", Role.DECODE, registration, is_ready, False, 100, 100, 0, 0)


fleets = st.lists(st.booleans(), min_size=1, max_size=5).map(
    lambda ready: [view(number, is_ready=is_ready) for number, is_ready in enumerate(ready)]
)
histories = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(REFUSALS + FAILURES), st.floats(0.0, 10.0)), max_size=8
)


def after(history: list[tuple[int, TwostrokeError, float]], fleet: list[WorkerView]) -> tuple[Avoided, float]:
    """What a generation avoids, and the time, once the workers have failed it one after the other."""
    avoided, now_s = Avoided(), START_S
    for number, error, seconds in history:
        now_s += seconds
        avoided.add(fleet[number % len(fleet)], error, now_s)
    return avoided, now_s


@given(fleets, histories, st.floats(0.0, 20.0))
def test_one_that_failed_is_used_only_where_no_other_takes_work(
    fleet: list[WorkerView], history: list[tuple[int, TwostrokeError, float]], later_s: float
) -> None:
    avoided, now_s = after(history, fleet)
    usable = avoided.usable(fleet, now_s + later_s)
    fresh = [worker for worker in fleet if worker.is_ready and worker not in avoided]
    assert usable == fresh if fresh else all(worker in avoided for worker in usable)
    assert all(worker.takes_work and avoided.may_use(worker, now_s + later_s) for worker in usable)


@given(fleets, histories)
def test_whoever_is_ready_may_be_used_once_every_pause_is_over(
    fleet: list[WorkerView], history: list[tuple[int, TwostrokeError, float]]
) -> None:
    """And the end of each pause is told, so that nobody waits for longer than that."""
    avoided, now_s = after(history, fleet)
    until_s = now_s + LONGEST_PAUSE_S
    while not avoided.usable(fleet, now_s) and any(worker.is_ready for worker in fleet):
        pause_end_s = avoided.next_pause_end_s(now_s)
        assert pause_end_s is not None
        assert now_s < pause_end_s <= until_s
        now_s = pause_end_s


@given(fleets, histories)
def test_a_worker_that_comes_back_is_another_one(
    fleet: list[WorkerView], history: list[tuple[int, TwostrokeError, float]]
) -> None:
    avoided, now_s = after(history, fleet)
    again = [replace(worker, registration=2, is_ready=True) for worker in fleet]
    assert avoided.usable([*fleet, *again], now_s)[-len(again) :] == again


def usable_at(avoided: Avoided, seconds: float) -> bool:
    return bool(avoided.usable([view(0)], START_S + seconds))


def test_how_long_each_is_avoided_where_it_is_the_only_one() -> None:
    """A death is noticed first; what is known to be alive is asked at once, but not over and over."""
    for error, pause_s in (
        (CorruptFrame("checksum"), 0.0),
        (PeerLost("gone"), UNNOTICED_S),
        (NoRoom("full"), REFUSAL_PAUSE_S),
        (NoRoom("full", retry_after_s=3.0), 3.0),
        (Draining("leaving"), REFUSAL_PAUSE_S),
    ):
        avoided = Avoided()
        avoided.add(view(0), error, START_S)
        assert usable_at(avoided, pause_s)
        assert pause_s == 0.0 or not usable_at(avoided, pause_s - 0.01)
    avoided = Avoided()
    for _ in range(2):
        avoided.add(view(0), CorruptFrame("checksum"), START_S)
    assert not usable_at(avoided, UNNOTICED_S - 0.01)
    assert usable_at(avoided, UNNOTICED_S)
