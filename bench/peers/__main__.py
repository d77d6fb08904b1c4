"""`python -m bench.peers`: Twostroke and its peers, the same work, in turn. Exits 1 where an engine failed."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.environments import CannotInstall
from bench.peers.lineup import DEFAULT_ENGINES, ENGINES, Lineup, line_up
from bench.peers.rounds import Failure, run_rounds, say
from bench.peers.table import Rounds, compare, markdown
from bench.peers.work import ROWS, WORKS
from bench.replay.surroundings import hardware, versions

ROOT = Path("build/peers")
TWOSTROKE = "twostroke"
DEFAULT_VARIANT = "--topology colocated --numerics int8 --no-speculation"


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    variants = (given.twostroke_options or [DEFAULT_VARIANT]) if TWOSTROKE in given.engines else []
    works = [work for work in WORKS if work.name in given.works]
    try:
        lineup = line_up(given.root.absolute(), variants, [name for name in given.engines if name != TWOSTROKE])
    except CannotInstall as why:
        print(f"no run: the client cannot be installed: {why}", file=sys.stderr)
        return 1
    load_before = os.getloadavg()[0]
    try:
        rounds, failures = run_rounds(lineup.engines, works, given.rounds)
    finally:
        lineup.stop()
    table = markdown(rounds, list(lineup.ours), list(lineup.peers))
    page = "\n".join([_heading(lineup, given.rounds, load_before), "", table, "", *_missing(lineup, failures)])
    out = given.out or given.root / "result.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_result(lineup, rounds, failures, load_before), indent=1) + "\n")
    out.with_suffix(".md").write_text(page)
    say(f"written: {out} and {out.with_suffix('.md')}")
    print(page)
    return 1 if failures else 0


def _heading(lineup: Lineup, num_rounds: int, load_before: float) -> str:
    machine = hardware()
    engines = "; ".join(f"{name}: {release}" for name, release in lineup.releases.items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores. {engines}. Medians of {num_rounds} rounds; "
        f"load before the first: {load_before:.1f}."
    )


def _missing(lineup: Lineup, failures: Sequence[Failure]) -> list[str]:
    lines = [f"- {name}: {why}" for name, why in lineup.absent.items()]
    return lines + [f"- {each.engine}, round {each.round}, {each.work}: {each.reason}" for each in failures]


def _result(lineup: Lineup, rounds: Rounds, failures: Sequence[Failure], load_before: float) -> dict[str, Any]:
    comparisons = {
        row.label: [asdict(found) for ours in lineup.ours if (found := compare(row, rounds, ours, list(lineup.peers)))]
        for row in ROWS
    }
    return {
        "hardware": hardware(),
        "versions": versions(),
        "engines": lineup.releases,
        "absent": lineup.absent,
        "load_before": load_before,
        "works": [asdict(work) for work in WORKS],
        "rounds": {
            name: [{work: asdict(figures) for work, figures in each.items()} for each in turns]
            for name, turns in rounds.items()
        },
        "failures": [asdict(failure) for failure in failures],
        "comparisons": comparisons,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.peers", description="The same work on Twostroke and on its peers.")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[TWOSTROKE, *ENGINES],
        default=[TWOSTROKE, *DEFAULT_ENGINES],
        help=f"default: {' '.join([TWOSTROKE, *DEFAULT_ENGINES])}",
    )
    parser.add_argument("--works", nargs="+", choices=[work.name for work in WORKS], default=[w.name for w in WORKS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--twostroke-options",
        action="append",
        metavar="OPTIONS",
        help=f"of `twostroke up`, as one argument; repeat it for several variants (default: '{DEFAULT_VARIANT}')",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=f"of environments, models and logs (default: {ROOT})")
    parser.add_argument("--out", type=Path, help="the table goes beside it as .md (default: result.json in the root)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else its engine would be left behind
    sys.exit(main())
