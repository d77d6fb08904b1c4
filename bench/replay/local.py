"""`python -m bench.replay.local`: replays one short trace against local stacks that it starts, each anew, in turn.

Each run's result and page, and the card of the last shape against the first, go to the output folder. The answers
must be the same in all shapes: that is the gate on quality. Exits as `bench.replay` does, and with 1 where the answers
differ although the stacks promise the same ones.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.replay import compare
from bench.replay.__main__ import main as replay
from bench.replay.card.gates import Verdict

EXIT_STACK = 4
EXIT_OTHER_ANSWERS = 1
_STOP_S = 60.0
_TRACE = (
    "--arrivals closed --num-clients 4 --num-requests 20 --warm-up 4 --bucket-weights 4 1 0 --max-input 768 "
    "--min-output 8 --max-output 32 --shared-prefix-share 0.5 --num-prefixes 2 "
    "--objective-ttft-ms 2000 --objective-tpot-ms 100"
)


class StackFailed(Exception):
    """The stack ended before it served; `str` is what it said."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    given.out_dir.mkdir(parents=True, exist_ok=True)
    for run in (f"{topology}-{number}" for number in range(1, given.num_runs + 1) for topology in given.topologies):
        print(f"replaying against {run}", flush=True)
        code = _run(given, run)
        if code:
            return code
    return _compare(given) if len(given.topologies) > 1 else 0


def _run(given: argparse.Namespace, run: str) -> int:
    topology = run.rpartition("-")[0]
    try:
        with local_stack(topology, given.stack_arguments.split()) as url:
            result, page = (str(given.out_dir / f"replay-{run}.{kind}") for kind in ("json", "html"))
            notes = f"twostroke up --topology {topology} {given.stack_arguments}".strip()
            where = ["--url", url, "--out", result, "--html", page, "--notes", notes]
            return replay([*where, *given.replay_arguments.split()])
    except StackFailed as failed:
        print(f"no run: {failed}", file=sys.stderr)
        return EXIT_STACK


@contextmanager
def local_stack(topology: str, arguments: Sequence[str]) -> Iterator[str]:
    """The URL of a stack on a free port, ended in order afterwards. Raises StackFailed where it does not come up."""
    port = _free_port()
    command = [sys.executable, "-m", "cli", "up", "--topology", topology, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603  ours
    try:
        _await_serving(process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _await_serving(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Serving on" in line:
            return
    raise StackFailed(f"the stack ended before it served:\n{''.join(said)}")


def _compare(given: argparse.Namespace) -> int:
    """Which shape to adopt is for a person to say; other answers are a defect."""
    (before, *more_before), (after, *more_after) = (
        [str(given.out_dir / f"replay-{topology}-{number}.json") for number in range(1, given.num_runs + 1)]
        for topology in (given.topologies[0], given.topologies[-1])
    )
    card = given.out_dir / "card.json"
    more = ["--also-before", *more_before, "--also-after", *more_after] if more_before else []
    code = compare.main([before, after, *more, "--out", str(card), "--html", str(given.out_dir / "card.html")])
    if code:
        return code
    has_failed = json.loads(card.read_text())["gates"]["quality"]["verdict"] == Verdict.FAILED
    return EXIT_OTHER_ANSWERS if has_failed else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.replay.local", description="Replay traffic against local stacks.")
    parser.add_argument("--topologies", nargs="+", default=["colocated", "1p1d"], help="default: colocated 1p1d")
    parser.add_argument("--num-runs", type=int, default=1, help="of each, in turn; from 2 on the card knows the noise")
    parser.add_argument("--out-dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--stack-arguments", default="--numerics int8", help="for twostroke up, in one string")
    parser.add_argument("--replay-arguments", default=_TRACE, help="for bench.replay, in one string")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the stack would be left behind
    sys.exit(main())
