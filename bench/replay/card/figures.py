"""What a card compares: one value per run, slice and figure. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.replay.card.noise import Better, Difference, compare

Run = Mapping[str, Any]
"""A result of `bench.replay`, as its JSON says."""
Slices = dict[str, dict[str, Difference]]
"""Slice (overall, or a bucket) to figure to difference."""

OVERALL = "overall"
GOODPUT = "goodput_requests_per_s"
MEMORY = "peak_memory_bytes"
_DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "inter_token_ms", "exposed_transfer_ms")
GATED = ("ttft_ms.p99", "inter_token_ms.p99")
DECIDING = ("ttft_ms.p50", "tpot_ms.p50", "output_tokens_per_s", GOODPUT)

FIGURES: Mapping[str, Better] = {
    **{f"{name}.{rank}": Better.LOWER for name in _DISTRIBUTIONS for rank in ("p50", "p95", "p99")},
    "output_tokens_per_s": Better.HIGHER,
    GOODPUT: Better.HIGHER,
    "num_cached_tokens": Better.HIGHER,
    "kv_bytes": Better.LOWER,
    MEMORY: Better.LOWER,
}


def differences(before: Sequence[Run], after: Sequence[Run], assumed_share: float) -> Slices:
    """Figures that any run lacks are left out; goodput too where the objectives were not the same."""
    one_goodput = len({_objectives(run) for run in (*before, *after)}) == 1
    found: Slices = {}
    for name in slices_of(before[0]):
        for figure, better in FIGURES.items():
            sides = [[value_of(run, name, figure) for run in side] for side in (before, after)]
            values = [[value for value in side if value is not None] for side in sides]
            is_complete = [*map(len, values)] == [*map(len, sides)]
            if is_complete and (figure != GOODPUT or one_goodput):
                found.setdefault(name, {})[figure] = compare(values[0], values[1], better, assumed_share)
    return found


def slices_of(run: Run) -> list[str]:
    return [OVERALL, *run["report"]["buckets"]]


def value_of(run: Run, slice_name: str, figure: str) -> float | None:
    """None where the run did not measure it."""
    if figure == MEMORY:
        return _memory(run) if slice_name == OVERALL else None
    report = run["report"]
    held: Any = report[OVERALL] if slice_name == OVERALL else report["buckets"].get(slice_name, {})
    for part in figure.split("."):
        held = held.get(part) if isinstance(held, Mapping) else None
    return None if held is None else float(held)


def num_unanswered(run: Run) -> int:
    figures = run["report"][OVERALL]
    return int(figures["num_failed"]) + int(figures["num_timed_out"])


def _memory(run: Run) -> float | None:
    """Of all processes together; pages that they share count in each."""
    peaks = (run["server"] or {}).get(MEMORY) or {}
    return float(sum(peaks.values())) if peaks else None


def _objectives(run: Run) -> tuple[Any, Any]:
    configuration = run["configuration"]
    return configuration["objective_ttft_s"], configuration["objective_tpot_s"]
