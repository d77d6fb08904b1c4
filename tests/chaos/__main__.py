"""`make chaos`: a 2p2d stack under load and under every fault; every answer compared with the one without faults."""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx

from common.faults.plan import parse_plan
from tests.chaos import network
from tests.chaos.cases import make_cases
from tests.chaos.folder import run_in_folder
from tests.chaos.harness import FAULTS, GATEWAY_FLAGS, answers_without_faults, environment, leaked_blocks
from tests.chaos.load import Limits, Load, Totals
from tests.chaos.options import parse
from tests.chaos.report import Goal, Outcome
from tests.chaos.stack import ChaosStack, Plan, worker_loads
from tests.support.tiny_models import make_tiny_model

NOTICE_S = 1.0
"""The gateway has noticed a death by then: before, everyone still looks ready."""
CLOSING_S = 400.0
"""After the last new request: open ones end (or hang), services come back, blocks return."""


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
        goal = Goal(options.requests, frozenset(stack.services if options.kills else ()))
        kills: Counter[str] = Counter()
        began_s = time.monotonic()
        async with asyncio.timeout(options.max_s + CLOSING_S):
            trouble = await _ask_and_kill(stack, load, goal, kills, options)
            wall_s = time.monotonic() - began_s
            await load.close()
            await stack.until_ready()
            leaked = await leaked_blocks(stack, start)
        injected = stack.injected()
        return Outcome(
            totals=load.totals,
            seed=options.seed,
            wall_s=wall_s,
            injected=injected,
            kills=kills,
            leaked_blocks=leaked,
            defects=stack.defects() + trouble,
            goal=goal,
            never_injected=sorted(_planned(faults) - injected.keys()),
            settings={key: value for key, value in vars(options).items() if key != "out"} | {"faults_at": faults},
        )


async def _ask_and_kill(
    stack: ChaosStack, load: Load, goal: Goal, kills: Counter[str], options: argparse.Namespace
) -> list[str]:
    """Until the goal is reached, `max_s` at most. Returns what kept the killing from going on."""
    began_s = time.monotonic()
    tasks = [asyncio.create_task(_show_progress(load.totals, goal, kills, began_s))]
    if options.kills:
        tasks.append(asyncio.create_task(kill_now_and_then(stack, kills, options.kill_interval_s, options.seed)))

    def goes_on(totals: Totals) -> bool:
        return bool(goal.missing(totals.requests, kills)) and time.monotonic() - began_s < options.max_s

    await load.run(options.concurrency, goes_on)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [str(end) or repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)]


def _planned(faults: dict[str, str]) -> set[str]:
    """`point kind` of every rule."""
    return {f"{rule.point} {rule.kind}" for plan in faults.values() for rule in parse_plan(plan).rules}


async def _show_progress(totals: Totals, goal: Goal, kills: Counter[str], began_s: float) -> None:
    while True:
        await asyncio.sleep(10)
        missing = "; ".join(goal.missing(totals.requests, kills)) or "nothing"
        print(
            f"  {time.monotonic() - began_s:5.0f} s: {totals.requests} requests, {len(totals.wrong)} wrong, "
            f"{len(totals.hangs)} hangs, {sum(totals.failed.values())} failed; still to come: {missing}",
            flush=True,
        )


def report(options: argparse.Namespace, work_dir: Path) -> bool:
    """Runs, prints the table and why the run failed, if it did."""
    outcome = asyncio.run(run(options, work_dir))
    print(outcome.table())
    if options.out is not None:
        outcome.write(options.out)
    for complaint in outcome.complaints:
        print(f"chaos: {complaint}")
    return not outcome.complaints


def main() -> int:
    options = parse(sys.argv[1:])
    if options.network:
        return network.main_outside(sys.argv[1:])
    return run_in_folder("chaos", partial(report, options))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the stack would be left behind
    sys.exit(main())
