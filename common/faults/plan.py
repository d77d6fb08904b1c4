"""A plan of faults as one line of text: `kv.ack:drop@0.01,decode.stream:delay@0.05~0.2;seed=7`.

Each entry is point:kind@probability, and for a delay ~seconds. The same plan and seed make the same decisions at each
point of a process, in the order in which it is passed.
"""

import re
from dataclasses import dataclass

from common.errors import ConfigError
from common.faults.points import KINDS_AT, FaultKind, Point

DEFAULT_DELAY_S = 0.2
_ENTRY = re.compile(r"(?P<point>[a-z_.]+):(?P<kind>[a-z]+)@(?P<probability>[0-9.e-]+)(~(?P<delay_s>[0-9.]+))?")


@dataclass(frozen=True, slots=True)
class FaultRule:
    point: Point
    kind: FaultKind
    probability: float
    delay_s: float = DEFAULT_DELAY_S


@dataclass(frozen=True, slots=True)
class FaultPlan:
    rules: tuple[FaultRule, ...]
    seed: int


def parse_plan(text: str) -> FaultPlan:
    """Raises ConfigError, naming the entry and what is allowed."""
    entries, _, option = text.partition(";")
    return FaultPlan(tuple(_parse_rule(entry.strip()) for entry in entries.split(",")), _parse_seed(option.strip()))


def _parse_seed(option: str) -> int:
    if not option:
        return 0
    match = re.fullmatch(r"seed=([0-9]+)", option)
    if match is None:
        raise ConfigError(f"faults: {option!r} after the semicolon; it may be seed=NUMBER")
    return int(match[1])


def _parse_rule(entry: str) -> FaultRule:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigError(f"faults: {entry!r} is not point:kind@probability (a delay: ~seconds after it)")
    if match["point"] not in set(Point):
        raise ConfigError(f"faults: {match['point']!r} is no point; there are {', '.join(Point)}")
    point = Point(match["point"])
    allowed = sorted(KINDS_AT[point])
    if match["kind"] not in allowed:
        raise ConfigError(f"faults: {match['kind']!r} is no fault of {point}; there are {', '.join(allowed)}")
    probability = _number(match["probability"], entry)
    if not 0 <= probability <= 1:
        raise ConfigError(f"faults: {entry!r}: the probability must be from 0 to 1")
    delay_s = _number(match["delay_s"], entry) if match["delay_s"] else DEFAULT_DELAY_S
    return FaultRule(point, FaultKind(match["kind"]), probability, delay_s)


def _number(text: str, entry: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"faults: {entry!r}: {text!r} is no number") from None
