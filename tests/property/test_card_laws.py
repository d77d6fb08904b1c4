"""Laws of comparisons: what may never depend on order, unit or the side that is called before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.card.decision import Choice, decide
from bench.replay.card.gates import Gate, Verdict
from bench.replay.card.noise import Better, Change, Difference, compare

sides = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=6)
directions = st.sampled_from([*Better])
OPPOSITE = {Change.BETTER: Change.WORSE, Change.WORSE: Change.BETTER, Change.SAME: Change.SAME}


@given(sides, sides, directions)
def test_the_sides_mirror_each_other(before: list[float], after: list[float], better: Better) -> None:
    there, back = compare(before, after, better, 0.1), compare(after, before, better, 0.1)
    assert there.noise == pytest.approx(back.noise)
    assert there.change is OPPOSITE[back.change]


@given(sides, sides, directions)
def test_the_order_of_runs_and_the_direction_do_not_matter(
    before: list[float], after: list[float], better: Better
) -> None:
    held = compare(before, after, better, 0.1)
    again = compare(sorted(before), sorted(after), better, 0.1)
    assert again.change is held.change
    other = Better.HIGHER if better is Better.LOWER else Better.LOWER
    assert compare(before, after, other, 0.1).change is OPPOSITE[held.change]


@given(sides, st.integers(-10, 10), directions)
def test_the_unit_does_not_matter(side: list[float], exponent: int, better: Better) -> None:
    """A power of two scales without rounding."""
    factor = 2.0**exponent
    doubled = [value * 1.3 for value in side]
    plain = compare(side, doubled, better, 0.1)
    scaled = compare([value * factor for value in side], [value * factor for value in doubled], better, 0.1)
    assert scaled.change is plain.change
    assert scaled.noise == pytest.approx(plain.noise * factor)


@given(sides, directions)
def test_a_side_is_never_better_than_itself(side: list[float], better: Better) -> None:
    assert compare(side, side, better, 0.0).change is Change.SAME


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([*Change])),
    st.lists(st.sampled_from([*Verdict]), min_size=1, max_size=3),
)
def test_adoption_needs_every_gate_and_something_better(changes: dict[str, Change], verdicts: list[Verdict]) -> None:
    deciding = {name: Difference(1.0, 2.0, 0.1, change) for name, change in changes.items()}
    decision = decide(deciding, [Gate(verdict, "why") for verdict in verdicts])
    may_adopt = set(verdicts) == {Verdict.PASSED} and Change.BETTER in changes.values()
    assert (decision.choice is Choice.ADOPT) is (may_adopt and Change.WORSE not in changes.values())
    assert Verdict.FAILED not in verdicts or decision.choice is Choice.REJECT
    assert decision.reason
