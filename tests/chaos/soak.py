"""`make soak`: a 2p2d stack under a steady load; resident memory, open files, threads and blocks must stay flat.

Judged over what follows the warm-up (the first quarter): resident memory by the slope of a straight line through its
samples, files and threads by their highest counts in the first and the last third, blocks by their count at the end.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression

import httpx

from tests.chaos.cases import make_cases
from tests.chaos.folder import run_in_folder
from tests.chaos.harness import answers_without_faults, environment, leaked_blocks
from tests.chaos.load import Limits, Load
from tests.chaos.stack import ChaosStack, Plan, worker_loads
from tests.support.tiny_models import make_tiny_model

WARM_UP_SHARE = 0.25
MAX_GROWTH_SHARE = 0.03
MAX_GROWTH_MIB = 6.0
"""What resident memory may grow by over the judged time, by the straight line: the larger of the two. The first is of
its mean; the second allows for a process that is small."""
MAX_MORE_THREADS = 2
MAX_MORE_FILES = 8
"""Connections come and go, as many as there are clients; what leaks with each request is soon more."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    resident_mib: float
    open_files: int
    threads: int


@dataclass(frozen=True)
class Verdict:
    service: str
    resident_mib: tuple[float, float]  # mean of the first and of the last third of what is judged
    growth_mib: float  # by the straight line, over what is judged
    open_files: tuple[int, int]  # highest in the first and in the last third
    threads: tuple[int, int]

    @property
    def is_flat(self) -> bool:
        allowed_mib = max(MAX_GROWTH_MIB, MAX_GROWTH_SHARE * fmean(self.resident_mib))
        more_files, more_threads = (last - first for first, last in (self.open_files, self.threads))
        return self.growth_mib <= allowed_mib and more_files <= MAX_MORE_FILES and more_threads <= MAX_MORE_THREADS

    def row(self) -> str:
        return (
            f"{self.service:<10} {self.resident_mib[0]:>9.1f} {self.resident_mib[1]:>9.1f} {self.growth_mib:>+9.2f}"
            f" {self.open_files[0]:>7} {self.open_files[1]:>6} {self.threads[0]:>8} {self.threads[1]:>6}"
            f"   {'flat' if self.is_flat else 'GROWS'}"
        )


HEADER = f"{'':<10} {'MiB first':>9} {'last':>9} {'growth':>9} {'files 1st':>7} {'last':>4} {'threads':>8} {'last':>6}"


def judge(service: str, samples: Sequence[Sample]) -> Verdict:
    """Precondition: at least eight samples."""
    judged = samples[int(len(samples) * WARM_UP_SHARE) :]
    third = len(judged) // 3
    first, last = judged[:third], judged[-third:]
    line = linear_regression([sample.at_s for sample in judged], [sample.resident_mib for sample in judged])
    return Verdict(
        service,
        (fmean(s.resident_mib for s in first), fmean(s.resident_mib for s in last)),
        line.slope * (judged[-1].at_s - judged[0].at_s),
        (max(s.open_files for s in first), max(s.open_files for s in last)),
        (max(s.threads for s in first), max(s.threads for s in last)),
    )


def sample(pid: int, at_s: float) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    resident_mib = int(status["VmRSS"].split()[0]) / 1024
    return Sample(at_s, resident_mib, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"]))


async def run(options: argparse.Namespace, work_dir: Path) -> bool:
    limits = Limits(deadline_s=60.0, hang_s=120.0)
    model = make_tiny_model(work_dir / "tiny", "llama")
    cases = make_cases(options.seed, 100)
    print(f"soak: logs in {work_dir}; computing {len(cases)} answers", flush=True)
    expected = await answers_without_faults(model, work_dir, cases, limits)
    plan = Plan(model, work_dir / "soak", 2, 2, environment(work_dir))
    async with ChaosStack(plan) as stack:
        async with httpx.AsyncClient(base_url=stack.url) as client:
            start = {worker: load["free_blocks"] for worker, load in (await worker_loads(client)).items()}
        load = Load(stack.url, cases, expected, limits, options.seed)
        began_s = time.monotonic()
        until_s = began_s + options.minutes * 60
        loading = asyncio.create_task(load.run(options.clients, lambda _: time.monotonic() < until_s))
        samples: dict[str, list[Sample]] = {name: [] for name in stack.services}
        while not loading.done():
            await asyncio.sleep(options.interval_s)
            for name in samples:
                samples[name].append(sample(stack.pid(name), time.monotonic() - began_s))
        await loading
        await load.close()
        leaked = await leaked_blocks(stack, start)
        defects = stack.defects()
    totals = load.totals
    verdicts = [judge(name, taken) for name, taken in samples.items()]
    print(HEADER)
    for verdict in verdicts:
        print(verdict.row())
    print(
        f"{options.minutes:g} minutes, {totals.requests} requests ({totals.requests / (options.minutes * 60):.1f}/s), "
        f"{len(totals.wrong)} wrong, {len(totals.hangs)} hangs, {sum(totals.failed.values())} failed; blocks: "
        f"{int(sum(leaked.values()))} lacking of {int(sum(start.values()))}; defects in the logs: {len(defects)}"
    )
    for line in (*totals.wrong[:5], *totals.failed, *defects[:5]):
        print(f"  ! {line[:300]}")
    is_well = all(v.is_flat for v in verdicts) and not (
        leaked or totals.wrong or totals.hangs or totals.failed or defects
    )
    if options.out is not None:
        rows = [
            vars(verdict) | {"is_flat": verdict.is_flat, "samples": [vars(each) for each in samples[verdict.service]]}
            for verdict in verdicts
        ]
        result = {"minutes": options.minutes, "requests": totals.requests, "leaked_blocks": leaked, "services": rows}
        options.out.write_text(json.dumps(result | {"is_well": is_well}, indent=2) + "\n")
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak ARGS=...", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--interval-s", type=float, default=5.0, help="time between two samples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file, with every sample")
    options = parser.parse_args()
    return run_in_folder("soak", lambda work_dir: asyncio.run(run(options, work_dir)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the stack would be left behind
    sys.exit(main())
