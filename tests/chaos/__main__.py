"""`make chaos`: a 2p2d stack under load and under every fault; every answer compared with the one without faults."""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import httpx

from tests.chaos import network
from tests.chaos.cases import make_cases
from tests.chaos.harness import FAULTS, GATEWAY_FLAGS, answers_without_faults, environment, leaked_blocks
from tests.chaos.load import Limits, Load, Totals
from tests.chaos.options import parse
from tests.chaos.report import Outcome
from tests.chaos.stack import ChaosStack, Plan, worker_loads
from tests.support.tiny_models import make_tiny_model

NOTICE_S = 1.0
"""The gateway has noticed a death by then: before, everyone still looks ready."""


async def kill_now_and_then(stack: ChaosStack, kills: Counter[str], interval_s: float, seed: int) -> None:
    """Every service in turn, in an order of the seed; each is back before the next one's turn."""
    draw = random.Random(seed)
    while True:
        for name in draw.sample(sorted(stack.services), len(stack.services)):
            await asyncio.sleep(interval_s * draw.uniform(0.5, 1.5))
            kills[name] += 1
            stack.kill(name)
            await asyncio.sleep(NOTICE_S)
            await stack.until_ready()


async def run(options: argparse.Namespace, work_dir: Path) -> Outcome:
    limits = Limits(options.deadline_s, options.hang_s)
    model = make_tiny_model(work_dir / "tiny", "llama")
    cases = make_cases(options.seed, options.cases)
    print(f"chaos: logs in {work_dir}; computing {len(cases)} answers without faults", flush=True)
    expected = await answers_without_faults(model, work_dir, cases, limits)
    faults = FAULTS if options.faults else {}
    plan = Plan(model, work_dir / "chaos", 2, 2, environment(work_dir), faults, gateway_flags=GATEWAY_FLAGS)
    async with ChaosStack(plan) as stack:
        async with httpx.AsyncClient(base_url=stack.url) as client:
            start = {worker: load["free_blocks"] for worker, load in (await worker_loads(client)).items()}
        load = Load(stack.url, cases, expected, limits, options.seed)
        kills: Counter[str] = Counter()
        began_s = time.monotonic()
        killer = asyncio.create_task(kill_now_and_then(stack, kills, options.kill_interval_s, options.seed))
        progress = asyncio.create_task(_show_progress(load.totals, began_s))
        if not options.kills:
            killer.cancel()

        def never_killed() -> list[str]:
            return sorted(stack.services.keys() - kills.keys()) if options.kills else []

        def goes_on(totals: Totals) -> bool:
            is_short = totals.requests < options.requests or bool(never_killed())
            return is_short and time.monotonic() - began_s < options.max_s

        await load.run(options.concurrency, goes_on)
        wall_s = time.monotonic() - began_s
        killer.cancel()
        progress.cancel()
        await load.close()
        await stack.until_ready()
        leaked = await leaked_blocks(stack, start)
        await asyncio.gather(killer, progress, return_exceptions=True)
        settings = {key: value for key, value in vars(options).items() if key != "out"} | {"faults_at": faults}
        return Outcome(
            totals=load.totals,
            seed=options.seed,
            wall_s=wall_s,
            injected=stack.injected(),
            kills=kills,
            leaked_blocks=leaked,
            defects=stack.defects(),
            min_requests=options.requests,
            never_killed=never_killed(),
            settings=settings,
        )


async def _show_progress(totals: Totals, began_s: float) -> None:
    while True:
        await asyncio.sleep(10)
        print(
            f"  {time.monotonic() - began_s:5.0f} s: {totals.requests} requests, {len(totals.wrong)} wrong, "
            f"{len(totals.hangs)} hangs, {sum(totals.failed.values())} failed",
            flush=True,
        )


def main() -> int:
    options = parse(sys.argv[1:])
    if options.network:
        return network.main_outside(sys.argv[1:])
    work_dir = Path(mkdtemp(prefix="twostroke-chaos-"))
    outcome = asyncio.run(run(options, work_dir))
    print(outcome.table())
    if options.out is not None:
        outcome.write(options.out)
    for complaint in outcome.complaints:
        print(f"chaos: FAILED, {complaint}")
    print(f"chaos: {'failed' if outcome.complaints else 'passed'}; logs in {work_dir}")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
