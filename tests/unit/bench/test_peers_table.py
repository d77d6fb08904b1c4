"""Ratios, the best peer and the client's figures: pure, and wrong in ways that flatter if wrong."""

import pytest

from bench.peers.drivers import WorkFailed, figures_of
from bench.peers.table import compare, growth, markdown, ratio, value, verdict
from bench.peers.work import LONG_PROMPT, ONE, ROWS, SIXTEEN, WORKS, Better, Figures

TPOT = next(row for row in ROWS if row.works == (ONE,) and "TPOT" in row.label)
OUTPUT = next(row for row in ROWS if row.works == (SIXTEEN,))


def figures(tpot_ms: float = 10.0, output: float = 100.0) -> Figures:
    return Figures(ttft_ms=50.0, tpot_ms=tpot_ms, output_tokens_per_s=output)


def tpots(*values: float) -> list[dict[str, Figures]]:
    return [{ONE: figures(tpot_ms=each)} for each in values]


def outputs(*values: float) -> list[dict[str, Figures]]:
    return [{SIXTEEN: figures(output=each)} for each in values]


def test_value_is_the_median_of_the_rounds_that_have_it() -> None:
    assert value(TPOT, [*tpots(9.0, 30.0, 10.0), {}]) == 10.0
    assert value(TPOT, [{}]) is None


def test_ratio_is_of_the_same_round() -> None:
    # The machine was ten times slower in the second round; both were.
    assert ratio(TPOT, tpots(5.0, 50.0, 5.0), tpots(10.0, 100.0, 10.0)) == 0.5


def test_ratio_skips_rounds_that_one_side_lacks() -> None:
    assert ratio(TPOT, [{}, *tpots(8.0)], tpots(1.0, 4.0)) == 2.0
    assert ratio(TPOT, [{}], tpots(1.0)) is None


def test_best_peer_is_the_one_that_is_hardest_to_beat() -> None:
    slow, fast = tpots(20.0), tpots(8.0)
    found = compare(TPOT, {"ours": tpots(10.0), "slow": slow, "fast": fast}, "ours", ["slow", "fast"])
    assert found is not None
    assert (found.best_peer, found.ratio) == ("fast", 1.25)
    rates = {"ours": outputs(300.0), "slow": outputs(100.0), "fast": outputs(250.0)}
    found = compare(OUTPUT, rates, "ours", ["slow", "fast"])
    assert found is not None
    assert (found.best_peer, found.ratio) == ("fast", 1.2)


def test_nothing_is_compared_without_a_peer_that_has_figures() -> None:
    assert compare(TPOT, {"ours": tpots(10.0), "down": [{}]}, "ours", ["down"]) is None


@pytest.mark.parametrize(
    ("row", "ratio_to_best", "expected"),
    [
        (TPOT, 0.7, "aim"),
        (TPOT, 0.71, "must"),
        (TPOT, 1.01, "missed"),
        (OUTPUT, 1.8, "aim"),
        (OUTPUT, 1.79, "must"),
        (OUTPUT, 1.19, "missed"),
    ],
)
def test_verdict_at_the_limits(row: object, ratio_to_best: float, expected: str) -> None:
    assert verdict(row, ratio_to_best) == expected  # type: ignore[arg-type]


def test_growth_compares_within_a_round() -> None:
    assert growth([{ONE: figures(tpot_ms=10.0), LONG_PROMPT: figures(tpot_ms=13.0)}, {ONE: figures()}]) == 1.3


def test_markdown_shows_every_row_and_what_is_missing() -> None:
    page = markdown({"twostroke": tpots(9.871), "openvino": tpots(10.0)}, ["twostroke"], ["openvino"])
    lines = page.splitlines()
    assert len(lines) == 2 + len(ROWS) + 1
    assert lines[2].startswith("| 1 at once, 128 in / 64 out: TPOT, ms | 9.87 | 10.0 | 0.99 × openvino: must |")
    assert lines[4].count("–") == 3  # neither engine did it, so there is no ratio


def test_goals_and_rows_agree() -> None:
    names = {work.name for work in WORKS}
    for row in ROWS:
        assert set(row.works) <= names
        assert row.aim < row.must if row.better is Better.LOWER else row.aim > row.must


JOB = {"num_requests": 4, "num_output_tokens": 64}
RESULT = {
    "median_ttft_ms": 79.5,
    "median_tpot_ms": 10.75,
    "output_throughput": 88.25,
    "completed": 4,
    "total_output_tokens": 256,
}


def test_the_clients_figures() -> None:
    assert figures_of(RESULT, JOB) == Figures(79.5, 10.75, 88.25)


@pytest.mark.parametrize(
    ("wrong", "reason"), [({"completed": 3}, "3 of 4"), ({"total_output_tokens": 255}, "255 output tokens .* 256")]
)
def test_figures_of_less_than_was_asked_for_are_refused(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(WorkFailed, match=reason):
        figures_of({**RESULT, **wrong}, JOB)
