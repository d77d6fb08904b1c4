"""Medians and ratios of the rounds, and the Markdown table of them. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers.work import GROWTH, ROWS, Better, Figures, Row

Round = Mapping[str, Figures]  # by work; a work that failed is not there
Rounds = Mapping[str, Sequence[Round]]  # by engine
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one of our engines with the best peer in one row. `ratio`: ours over theirs, the median over the rounds."""

    ours: str
    best_peer: str
    ratio: float


def value(row: Row, rounds: Sequence[Round]) -> float | None:
    """The median over the rounds that have the row's works; None where none has."""
    values = [row.figure(by_work) for by_work in rounds if _has(by_work, row)]
    return median(values) if values else None


def ratio(row: Row, ours: Sequence[Round], theirs: Sequence[Round]) -> float | None:
    """Median of the rounds' ratios, so that a machine that was slower in one round weighs on both sides of it."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [row.figure(left) / row.figure(right) for left, right in pairs if _has(left, row) and _has(right, row)]
    return median(ratios) if ratios else None


def compare(row: Row, rounds: Rounds, ours: str, peers: Sequence[str]) -> Comparison | None:
    """With the peer that does best against ours; None where nothing can be compared."""
    ratios = {peer: ratio(row, rounds[ours], rounds[peer]) for peer in peers}
    held = {peer: each for peer, each in ratios.items() if each is not None}
    if not held:
        return None
    worst = max if row.better is Better.LOWER else min
    best_peer = worst(held, key=lambda peer: held[peer])
    return Comparison(ours, best_peer, held[best_peer])


def verdict(row: Row, ratio_to_best: float) -> str:
    for limit, word in ((row.aim, "aim"), (row.must, "must")):
        if ratio_to_best <= limit if row.better is Better.LOWER else ratio_to_best >= limit:
            return word
    return "missed"


def growth(rounds: Sequence[Round]) -> float | None:
    values = [GROWTH.of(by_work) for by_work in rounds if all(work in by_work for work in GROWTH.works)]
    return median(values) if values else None


def markdown(rounds: Rounds, ours: Sequence[str], peers: Sequence[str]) -> str:
    """Values by engine, then ours over the best peer's: × and which goal that meets (must, aim)."""
    engines = [*ours, *peers]
    head = ["work", *engines, *(f"{name} over best peer" for name in ours), "must", "aim"]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(row, rounds, ours, peers)) for row in ROWS]
    lines.append(_line(_growth_cells(rounds, ours, peers)))
    return "\n".join(lines)


def _cells(row: Row, rounds: Rounds, ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    values = [_number(value(row, rounds[engine])) for engine in (*ours, *peers)]
    sign = "≤" if row.better is Better.LOWER else "≥"
    goals = [f"{sign} {row.must} ×", f"{sign} {row.aim} ×"]
    return [f"{row.label}, {row.unit}", *values, *(_verdict_cell(row, rounds, name, peers) for name in ours), *goals]


def _verdict_cell(row: Row, rounds: Rounds, ours: str, peers: Sequence[str]) -> str:
    found = compare(row, rounds, ours, peers)
    return NOTHING if found is None else f"{found.ratio:.2f} × {found.best_peer}: {verdict(row, found.ratio)}"


def _growth_cells(rounds: Rounds, ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    values = [_number(growth(rounds[engine])) for engine in (*ours, *peers)]
    return [GROWTH.label, *values, *([NOTHING] * len(ours)), f"≤ {GROWTH.must}", f"≤ {GROWTH.aim}"]


def _has(by_work: Round, row: Row) -> bool:
    return all(work in by_work for work in row.works)


def _number(number: float | None) -> str:
    """Three figures or more: 9.87, 98.7, 987, 9,871."""
    if number is None:
        return NOTHING
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
