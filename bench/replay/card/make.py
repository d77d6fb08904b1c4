"""Puts a card together. Pure: runs in, JSON-able values out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.replay.card.comparable import changes
from bench.replay.card.decision import decide
from bench.replay.card.figures import DECIDING, OVERALL, Run, Slices, differences, slices_of
from bench.replay.card.gates import Gate, QualityLimits, answered_gate, compare_answers, p99_gate, quality_gate
from bench.replay.card.noise import MIN_DIFFERENCE, Difference
from common.errors import ConfigError

FORMAT = 1
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user lets decide."""

    deciding: tuple[str, ...] = DECIDING
    deciding_slice: str = OVERALL
    p99_tolerance: float = 0.10  # share
    assumed_noise: float = 0.10  # share; where both sides have one run alone
    answers_may_change: bool = False
    quality_limits: QualityLimits = field(default_factory=QualityLimits)


def make_card(before: Sequence[Run], after: Sequence[Run], rules: Rules, quality: Any | None = None) -> Json:
    """The runs are comparable (see `comparable.refusals`). `quality` is a quality file's content.

    Raises ConfigError for a slice that the runs do not have, or a quality file without figures.
    """
    if rules.deciding_slice not in slices_of(before[0]):
        raise ConfigError(f"the runs have no slice {rules.deciding_slice}; they have {', '.join(slices_of(before[0]))}")
    slices = differences(before, after, rules.assumed_noise)
    gates = {
        "quality": quality_gate(
            before, after, quality, rules.quality_limits, answers_may_change=rules.answers_may_change
        ),
        "p99": p99_gate(slices, rules.p99_tolerance),
        "answered": answered_gate(before, after),
    }
    figures = slices.get(rules.deciding_slice, {})
    decision = decide({name: figures[name] for name in rules.deciding if name in figures}, [*gates.values()])
    num_compared, num_different = compare_answers(before, after)
    return {
        "format": FORMAT,
        "decision": decision.choice.value,
        "reason": decision.reason,
        "num_runs": {"before": len(before), "after": len(after)},
        "noise": _noise_told(before, after, rules),
        "changed": changes(before[0], after[0]),
        "answers": {"num_compared": num_compared, "num_different": num_different},
        "gates": {name: _gate_json(gate) for name, gate in gates.items()},
        "rules": asdict(rules),
        "slices": _slices_json(slices),
    }


def _noise_told(before: Sequence[Run], after: Sequence[Run], rules: Rules) -> str:
    floor = f"at least {MIN_DIFFERENCE:.0%}"
    if len(before) + len(after) == 2:
        return f"assumed: {rules.assumed_noise:.0%}, {floor}; give several runs a side to measure it"
    return f"measured: 95 % confidence interval of the difference of the means over the runs, {floor}"


def _gate_json(gate: Gate) -> Json:
    return {"verdict": gate.verdict.value, "detail": gate.detail}


def _slices_json(slices: Slices) -> Json:
    return {name: {figure: _row(held) for figure, held in figures.items()} for name, figures in slices.items()}


def _row(held: Difference) -> Json:
    return {
        "before": held.before,
        "after": held.after,
        "ratio": held.ratio,
        "noise_share": held.noise_share,
        "change": held.change.value,
    }
