"""The command line of `make chaos`."""

import argparse
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...", description="The whole system under faults.")
    parser.add_argument(
        "--requests", type=int, default=5_000, help="go on for so many requests, and until every service was killed"
    )
    parser.add_argument("--max-s", type=float, default=900.0, help="end after this time, and fail where more was due")
    parser.add_argument("--concurrency", type=int, default=24, help="clients at once")
    parser.add_argument("--cases", type=int, default=300, help="different requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--hang-s", type=float, default=120.0)
    parser.add_argument(
        "--kill-interval-s", type=float, default=5.0, help="from the return of one service to the kill -9 of the next"
    )
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--network", action="store_true", help="break links between hosts instead (needs root)")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(argv)
