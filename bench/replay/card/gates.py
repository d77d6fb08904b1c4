"""What must hold before a change is adopted: quality, the slowest requests, answers at all. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.replay.card.figures import GATED, Run, Slices, num_unanswered
from bench.replay.card.noise import Change
from common.errors import ConfigError


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNSETTLED = "unsettled"  # neither was shown


@dataclass(frozen=True, slots=True)
class Gate:
    verdict: Verdict
    detail: str  # a clause for the reason


@dataclass(frozen=True, slots=True)
class QualityLimits:
    """Of a quality measurement against full precision, as `bench.numerics_quality` makes it."""

    max_perplexity_rise_percent: float = 0.5
    max_divergence_nats: float = 0.01
    min_top1_agreement_percent: float = 95.5
    min_tokens: int = 6000


def quality_gate(
    before: Sequence[Run],
    after: Sequence[Run],
    measured: Any | None,
    limits: QualityLimits,
    *,
    answers_may_change: bool,
) -> Gate:
    """Equal answers to equal requests are proof by themselves. Where they differ although every run promises the one
    answer, the change is wrong unless it is meant to change them; then, and without a promise, `measured` decides.
    """
    num_compared, num_different = compare_answers(before, after)
    answers = f"{num_different} of {num_compared} equal requests have other answers"
    if num_compared and not num_different:
        return Gate(Verdict.PASSED, f"all {num_compared} equal requests have equal answers")
    if num_different and promises_equal_answers([*before, *after]) and not answers_may_change:
        return Gate(Verdict.FAILED, f"{answers} although every run promises exact ones")
    shown = answers if num_compared else "no answers can be compared"
    if measured is None:
        return Gate(Verdict.UNSETTLED, f"{shown}, and no quality measurement was given")
    return _measured_gate(measured, limits)


def compare_answers(before: Sequence[Run], after: Sequence[Run]) -> tuple[int, int]:
    """Requests that completed on both sides, and those of them that have more than one answer in any runs."""
    start, end = _answers(before), _answers(after)
    shared = start.keys() & end.keys()
    return len(shared), sum(len(start[request] | end[request]) > 1 for request in shared)


def promises_equal_answers(runs: Sequence[Run]) -> bool:
    """One model on one numeric path, and every server says that it is exact."""
    promises = {(run["model"], run["promise"]["numerics"]) for run in runs}
    return len(promises) == 1 and all(run["promise"]["exact"] is True for run in runs)


def p99_gate(slices: Slices, tolerance: float) -> Gate:
    """Fails where a slice's p99 is worse by more than `tolerance` (a share) and by more than the noise."""
    gated = [
        (f"{figure} of {name}", figures[figure])
        for name, figures in slices.items()
        for figure in GATED
        if figure in figures
    ]
    if not gated:
        return Gate(Verdict.UNSETTLED, "no p99 was measured on both sides")
    over = [(name, held) for name, held in gated if held.after > held.before * (1 + tolerance)]
    worst = [(name, held) for name, held in over if held.change is Change.WORSE] or over
    if not worst:
        return Gate(Verdict.PASSED, f"no p99 is worse by more than {tolerance:.0%}")
    name, held = max(worst, key=lambda item: item[1].after / (item[1].before or 1e-9))
    is_worse = held.change is Change.WORSE
    told = f"{name} rises from {held.before:.1f} to {held.after:.1f} ms, tolerated are {tolerance:.0%}"
    return Gate(Verdict.FAILED, told) if is_worse else Gate(Verdict.UNSETTLED, f"{told}, but within the noise")


def answered_gate(before: Sequence[Run], after: Sequence[Run]) -> Gate:
    """Requests that got no answer flatter every figure of those that did."""
    start, end = max(map(num_unanswered, before)), max(map(num_unanswered, after))
    if end > start:
        return Gate(Verdict.FAILED, f"{end} requests of a run got no answer, and {start} before")
    return Gate(Verdict.PASSED, "no more requests went without an answer")


def _answers(runs: Sequence[Run]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for row in run["requests"]:
            if row["answer_digest"] is not None:
                found.setdefault(row["request_digest"], set()).add(row["answer_digest"])
    return found


def _measured_gate(measured: Any, limits: QualityLimits) -> Gate:
    totals = [*_totals(measured)]
    if not totals:
        raise ConfigError("the quality file has no figures of all texts; give one of bench.numerics_quality --json")
    missed = [told for total in totals for told in _misses(total, limits)]
    rise = max(total["perplexity_rise_percent"] for total in totals)
    if missed:
        return Gate(Verdict.FAILED, f"the quality measurement misses its limits: {', '.join(missed)}")
    return Gate(Verdict.PASSED, f"the quality measurement keeps its limits, perplexity {rise:+.2f} %")


def _totals(measured: Any) -> Iterator[Mapping[str, float]]:
    """Every `all` of a file, however deep: one a numeric path, or one of the KV format."""
    if isinstance(measured, Mapping):
        if isinstance(total := measured.get("all"), Mapping) and "perplexity_rise_percent" in total:
            yield total
        for value in measured.values():
            yield from _totals(value)


def _misses(total: Mapping[str, float], limits: QualityLimits) -> Iterator[str]:
    rise, agreed = total["perplexity_rise_percent"], total["top1_agreement_percent"]
    if rise > limits.max_perplexity_rise_percent:
        yield f"perplexity {rise:+.2f} % of {limits.max_perplexity_rise_percent:g} %"
    if total["divergence_nats"] > limits.max_divergence_nats:
        yield f"divergence {total['divergence_nats']:.4f} of {limits.max_divergence_nats:g} nats"
    if agreed < limits.min_top1_agreement_percent:
        yield f"top-1 agreement {agreed:.1f} of {limits.min_top1_agreement_percent:g} %"
    if total["num_tokens"] < limits.min_tokens:
        yield f"{total['num_tokens']:.0f} of {limits.min_tokens} tokens"
