"""`python -m bench.hand_off`: pushes beside raw gRPC, and what clients of a local stack wait because of the hand-off.

Exits with 3 and the reason where it refuses to report: no KV moved, an answer failed, a receiver did not get it all.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.hand_off.processes import BenchFailed, receivers
from bench.hand_off.push import measure_pushes
from bench.hand_off.report import Json, push_figures, table, wait_figures
from bench.hand_off.waits import measure_waits
from bench.replay.local import StackFailed
from bench.replay.surroundings import hardware, versions

EXIT_REFUSED = 3
PARTS = ("push", "waits")


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    load_before = os.getloadavg()[0]
    try:
        pushes = _pushes(given) if "push" in given.parts else []
        waits = _waits(given) if "waits" in given.parts else []
    except (BenchFailed, StackFailed) as why:
        print(f"no report: {why}", file=sys.stderr)
        return EXIT_REFUSED
    result = {
        "hardware": hardware(),
        "versions": versions(),
        "load": [load_before, os.getloadavg()[0]],
        "push": pushes,
        "waits": waits,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"load average before and after: {load_before:.1f}, {os.getloadavg()[0]:.1f}\n\n{table(pushes, waits)}")
    return 0


def _pushes(given: argparse.Namespace) -> list[Json]:
    with receivers(given.stack_arguments.split()) as found:
        times = asyncio.run(measure_pushes(found, given.prompt_tokens, given.rounds))
    return [push_figures(each) for each in times]


def _waits(given: argparse.Namespace) -> list[Json]:
    arguments = given.stack_arguments.split()
    waits = measure_waits(arguments, given.prompt_tokens, given.requests, given.output_tokens, given.seed)
    return [wait_figures(each) for each in waits]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.hand_off", description="What moving blocks costs.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[1024, 4096], help="default: 1024 4096")
    parser.add_argument("--rounds", type=int, default=20, help="pushes of each length")
    parser.add_argument("--requests", type=int, default=8, help="requests of each length")
    parser.add_argument("--output-tokens", type=int, default=24, help="of a request")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--stack-arguments", default="--no-speculation", help="for twostroke up and the decode worker")
    parser.add_argument("--out", type=Path, default=Path("build/bench/hand_off.json"))
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else processes would be left behind
    sys.exit(main())
