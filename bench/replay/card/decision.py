"""Adopt, hold or reject, and why, in one sentence. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.replay.card.gates import Gate, Verdict
from bench.replay.card.noise import Change, Difference


class Choice(StrEnum):
    ADOPT = "adopt"
    HOLD = "hold"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Decision:
    choice: Choice
    reason: str


def decide(deciding: Mapping[str, Difference], gates: Sequence[Gate]) -> Decision:
    """A failed gate rejects, an unsettled one holds. Of the deciding figures one must be better and none worse."""
    told = {change: _told(deciding, change) for change in Change}
    better, worse = told[Change.BETTER], told[Change.WORSE]
    failed = [gate.detail for gate in gates if gate.verdict is Verdict.FAILED]
    unsettled = [gate.detail for gate in gates if gate.verdict is Verdict.UNSETTLED]
    if failed:
        return Decision(Choice.REJECT, _sentence(*failed))
    if worse and not better:
        return Decision(Choice.REJECT, _sentence(f"{worse}, and nothing decided on is better"))
    if unsettled:
        return Decision(Choice.HOLD, _sentence(*unsettled))
    if better and worse:
        return Decision(Choice.HOLD, _sentence(f"{better}, but {worse}: which counts is for a person to say"))
    if not better:
        return Decision(Choice.HOLD, _sentence(_nothing_better(deciding)))
    return Decision(
        Choice.ADOPT, _sentence(f"{better} and nothing decided on is worse", *(gate.detail for gate in gates))
    )


def _nothing_better(deciding: Mapping[str, Difference]) -> str:
    if not deciding:
        return "no figure that decides was measured on both sides"
    return f"{', '.join(deciding)} differ by no more than the noise"


def _told(deciding: Mapping[str, Difference], change: Change) -> str:
    """The figures that changed so, as a clause; empty where none did."""
    return ", ".join(
        f"{name} is {change} ({held.before:.4g} to {held.after:.4g})"
        for name, held in deciding.items()
        if held.change is change
    )


def _sentence(*clauses: str) -> str:
    return "; ".join(clauses)
