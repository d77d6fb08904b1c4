"""What `make chaos` and `make soak` pass and what they fail: a harness that cannot fail shows nothing."""

from collections import Counter

import pytest

from tests.chaos.cases import Answer, make_cases
from tests.chaos.load import Totals
from tests.chaos.report import Outcome
from tests.chaos.soak import Sample, judge


def outcome(**changes: object) -> Outcome:
    fields: dict[str, object] = {
        "totals": Totals(right=10, hung_up=1, failed=Counter({"502 peer_lost": 1})),
        "seed": 1,
        "wall_s": 1.0,
        "injected": Counter({"kv.ack drop": 2, "kv.commit drop": 1}),
        "kills": Counter({"redis": 1}),
        "leaked_blocks": {},
        "defects": [],
        "min_requests": 12,
        "never_killed": [],
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def test_failed_requests_are_counted_and_forgiven() -> None:
    passed = outcome()
    assert passed.complaints == []
    table = {line[:58].strip(): line[58:].strip() for line in passed.table().splitlines()}
    assert (table["requests"], table["wrong answers"], table["502 peer_lost"], table["drop"]) == ("12", "0", "1", "3")
    assert passed.to_json()["faults_injected"] == {"kv.ack drop": 2, "kv.commit drop": 1}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"totals": Totals(right=12, wrong=["x"])}, "wrong answers: 1"),
        ({"totals": Totals(right=12, hangs=["x"])}, "hangs: 1"),
        ({"leaked_blocks": {"decode-0": 1.0}}, "leaked blocks: 1"),
        ({"defects": ["Traceback"]}, "defects in the logs: 1"),
        ({"never_killed": ["gateway", "redis"]}, "never killed: gateway, redis"),
        ({"min_requests": 13}, "12 requests of 13"),
    ],
)
def test_nothing_else_is(changes: dict[str, object], complaint: str) -> None:
    assert outcome(**changes).complaints == [complaint]


def test_what_was_cut_off_must_be_a_beginning() -> None:
    whole = Answer("one two", "length", ("one", " two"))
    assert whole.begins_with(Answer("one", None, ("one",)))
    assert whole.begins_with(Answer("", None, ()))
    assert not whole.begins_with(Answer("two", None, ()))
    assert not whole.begins_with(Answer("one", None, ("two",)))


def test_cases_are_the_seed_s() -> None:
    assert make_cases(3, 20) == make_cases(3, 20)
    assert make_cases(3, 20) != make_cases(4, 20)


@pytest.mark.parametrize(
    ("mib_per_minute", "files_per_minute", "threads_per_minute", "is_flat"),
    [
        (0.0, 0.0, 0.0, True),
        (0.2, 0.0, 0.0, True),
        (2.0, 0.0, 0.0, False),
        (0.0, 1.0, 0.0, False),
        (0.0, 0.0, 1.0, False),
    ],
)
def test_growth_is_found_over_noise(
    mib_per_minute: float, files_per_minute: float, threads_per_minute: float, is_flat: bool
) -> None:
    """Twenty minutes, a sample every ten seconds; the start is steep, as starts are."""
    samples = []
    for number in range(120):
        minutes = number / 6
        noise = (number * 7 % 5) - 2
        resident_mib = 400 + noise + mib_per_minute * minutes - max(0.0, 2 - minutes) * 100
        files, threads = 30 + number % 2 + files_per_minute * minutes, 20 + threads_per_minute * minutes
        samples.append(Sample(number * 10.0, resident_mib, int(files), int(threads)))
    assert judge("decode-0", samples).is_flat is is_flat
