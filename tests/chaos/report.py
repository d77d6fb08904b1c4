"""The outcome of a run: one table for people, one JSON file for machines."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.load import Totals

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Goal:
    """What must have happened before a run may end well."""

    min_requests: int
    kills: frozenset[str]  # names of the services that must have been killed once

    def missing(self, num_requests: int, killed: Iterable[str]) -> list[str]:
        """One line for each thing that has not happened yet."""
        never_killed = self.kills.difference(killed)
        lines = [f"never killed: {', '.join(sorted(never_killed))}"] if never_killed else []
        return lines + ([f"{num_requests} requests of {self.min_requests}"] if num_requests < self.min_requests else [])


@dataclass
class Outcome:
    totals: Totals
    seed: int
    wall_s: float
    injected: Counter[str]
    kills: Counter[str]
    leaked_blocks: dict[str, float]  # worker -> blocks, of workers that did not return to their start
    defects: list[str]
    goal: Goal
    never_injected: list[str]  # `point kind`, of the planned faults
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def complaints(self) -> list[str]:
        """Why the run failed; empty: it passed."""
        totals = self.totals
        found = {
            "wrong answers": len(totals.wrong),
            "leaked blocks": len(self.leaked_blocks),
            "hangs": len(totals.hangs),
            "defects in the logs": len(self.defects),
        }
        complaints = [f"{what}: {count}" for what, count in found.items() if count]
        return complaints + self.goal.missing(totals.requests, self.kills)

    def to_json(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "seed": self.seed,
            "wall_s": round(self.wall_s, 1),
            "requests": totals.requests,
            "right": totals.right,
            "wrong": len(totals.wrong),
            "leaked_blocks": self.leaked_blocks,
            "hangs": len(totals.hangs),
            "past_deadline": len(totals.late),
            "hung_up_by_client": totals.hung_up,
            "failed": dict(totals.failed),
            "refused_and_sent_again": dict(totals.refused),
            "fallbacks": dict(totals.fallbacks),
            "faults_injected": dict(self.injected),
            "never_injected": self.never_injected,
            "kills": dict(self.kills),
            "durations_s": _quantiles(totals.durations_s),
            "defects": self.defects,
            "examples": {"wrong": totals.wrong, "hangs": totals.hangs, "late": totals.late},
            "settings": self.settings,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")

    def table(self) -> str:
        totals = self.totals
        rows: list[tuple[str, object]] = [
            ("requests", totals.requests),
            ("  right answers", totals.right),
            ("  hung up by the client", totals.hung_up),
            ("wrong answers", len(totals.wrong)),
            ("leaked blocks", int(sum(self.leaked_blocks.values()))),
            ("hangs", len(totals.hangs)),
            ("past their deadline", len(totals.late)),
            ("failed", sum(totals.failed.values())),
            *_counted(totals.failed),
            ("refused, and sent again", sum(totals.refused.values())),
            *_counted(totals.refused),
            ("faults injected", sum(self.injected.values())),
            *_counted(self._injected_by_kind()),
            ("kill -9", sum(self.kills.values())),
            *_counted(self.kills),
            ("fallbacks told to clients", sum(n for name, n in totals.fallbacks.items() if name != "none")),
            *_counted(Counter({name: n for name, n in totals.fallbacks.items() if name != "none"})),
            ("defects in the logs", len(self.defects)),
        ]
        lines = [f"{name:<58} {value:>8}" for name, value in rows]
        lines += [f"time: {self.wall_s:.0f} s; seed {self.seed}; answers took {_quantiles(totals.durations_s)}"]
        if self.never_injected:
            lines.append(f"faults that no chance brought about: {', '.join(self.never_injected)}")
        for examples in (totals.wrong, totals.hangs, totals.late, self.defects):
            lines += [f"  ! {example[:400]}" for example in examples[:MAX_EXAMPLES]]
        lines += [f"  ! {worker} lacks {count:g} blocks" for worker, count in self.leaked_blocks.items()]
        return "\n".join(lines)

    def _injected_by_kind(self) -> Counter[str]:
        by_kind: Counter[str] = Counter()
        for name, count in self.injected.items():
            by_kind[name.split(" ")[1]] += count
        return by_kind


def _counted(counts: Counter[str]) -> list[tuple[str, object]]:
    return [(f"  {name}", count) for name, count in counts.most_common()]


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }
