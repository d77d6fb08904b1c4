"""What `make chaos` and `make soak` pass and what they fail: a harness that cannot fail shows nothing."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.cases import Answer, make_cases
from tests.chaos.folder import run_in_folder
from tests.chaos.load import Totals
from tests.chaos.report import Goal, Outcome
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
        "goal": Goal(12, frozenset({"redis"})),
        "never_injected": [],
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
        ({"kills": Counter()}, "never killed: redis"),
        ({"goal": Goal(12, frozenset({"gateway", "redis", "decode-0"}))}, "never killed: decode-0, gateway"),
        ({"goal": Goal(13, frozenset())}, "12 requests of 13"),
    ],
)
def test_nothing_else_is(changes: dict[str, object], complaint: str) -> None:
    assert outcome(**changes).complaints == [complaint]


def test_a_run_goes_on_for_whatever_is_missing() -> None:
    goal = Goal(10, frozenset({"gateway", "redis"}))
    assert goal.missing(9, ["redis"]) == ["never killed: gateway", "9 requests of 10"]
    assert goal.missing(5_000, ["redis", "redis"]) == ["never killed: gateway"]
    assert goal.missing(9, ["redis", "gateway"]) == ["9 requests of 10"]
    assert goal.missing(10, ["redis", "gateway"]) == []


def test_the_logs_of_a_run_are_kept_and_named_only_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_in_folder("chaos", lambda folder: bool((folder / "a.log").write_text("x"))) == 0
    assert (list(tmp_path.iterdir()), capsys.readouterr().out) == ([], "chaos: passed\n")

    def end_early(folder: Path) -> bool:
        raise AssertionError(folder)

    assert run_in_folder("chaos", lambda _: False) == 1
    with pytest.raises(AssertionError):
        run_in_folder("soak", end_early)
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(f"{f.name.split('-')[1]}: FAILED; logs in {f}" for f in tmp_path.iterdir())
    assert len(said) == 2


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
