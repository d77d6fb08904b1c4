"""Decides at each point whether a fault happens now. One injector a process, installed before anything is opened."""

import asyncio
import logging
import os
import random
import signal
from dataclasses import dataclass

from common.faults.plan import FaultPlan, FaultRule
from common.faults.points import FaultKind, Point
from common.logs import fields

log = logging.getLogger("twostroke.faults")

INJECTED = "FAULT INJECTED"
"""How every injected fault begins in the log, so that they can be counted after a process was killed."""


STALL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    delay_s: float
    bits: int  # random, for whoever must choose something


@dataclass(slots=True)
class _Stream:
    """The decisions of one rule, in order."""

    rule: FaultRule
    numbers: random.Random


class Injector:
    def __init__(self, plan: FaultPlan) -> None:
        self._streams: dict[Point, list[_Stream]] = {}
        for rule in plan.rules:
            numbers = random.Random(f"{plan.seed}/{rule.point}/{rule.kind}")  # noqa: S311 (repeatable, guards nothing)
            self._streams.setdefault(rule.point, []).append(_Stream(rule, numbers))

    def has(self, point: Point) -> bool:
        return point in self._streams

    async def pass_point(self, point: Point) -> Fault | None:
        """The fault that the caller must carry out, if any. Delays are waited out here, a stall until the caller is
        cancelled, and a kill does not return."""
        fault = self.draw(point)
        if fault is None:
            return None
        log.warning(INJECTED, extra=fields(point=point, kind=fault.kind))
        if fault.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind is FaultKind.STALL:
            await asyncio.sleep(STALL_S)
        if fault.kind is FaultKind.DELAY:
            await asyncio.sleep(fault.delay_s)
            return None
        return fault

    def draw(self, point: Point) -> Fault | None:
        """Every rule of the point draws once a passing; the first that hits wins."""
        found: Fault | None = None
        for stream in self._streams.get(point, ()):
            hits = stream.numbers.random() < stream.rule.probability
            bits = stream.numbers.getrandbits(63)
            if hits and found is None:
                found = Fault(stream.rule.kind, stream.rule.delay_s, bits)
        return found


_installed: Injector | None = None


def install(plan: FaultPlan | None) -> None:
    """Before channels, servers and index clients are made: they ask once. None: no faults."""
    global _installed
    _installed = None
    if plan is not None:
        for rule in plan.rules:
            log.warning("faults will be injected", extra=fields(point=rule.point, kind=rule.kind, p=rule.probability))
        _installed = Injector(plan)


def installed() -> Injector | None:
    return _installed
