"""`make chaos`: a 2p2d stack under load and under every fault; every answer compared with the one without faults."""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import httpx

from tests.chaos.cases import Answer, Case, make_cases
from tests.chaos.load import Limits, Load, Totals
from tests.chaos.report import Outcome
from tests.chaos.stack import ChaosStack, Plan, worker_loads
from tests.support.tiny_models import make_tiny_model

SETTLE_S = 30.0
"""Longer than leases and keepalive together: whoever holds a block after it will hold it for ever."""

FRAME_FAULTS = (
    "kv.{0}:drop@0.004,kv.{0}:duplicate@0.004,kv.{0}:reorder@0.004,kv.{0}:truncate@0.004,kv.{0}:flip@0.004,"
    "kv.{0}:delay@0.01,kv.{0}:stall@0.001,kv.{0}:kill@0.0002"
)
PREFILL_FAULTS = ",".join(
    [
        FRAME_FAULTS.format("frame_sent"),
        "prefill.reply:drop@0.004,prefill.reply:duplicate@0.004,prefill.reply:reorder@0.004",
        "prefill.reply:delay@0.01,prefill.reply:stall@0.001,prefill.reply:kill@0.0002",
        "index.call:drop@0.02,index.call:delay@0.02,index.call:stall@0.002",
    ]
)
DECODE_FAULTS = ",".join(
    [
        FRAME_FAULTS.format("frame_received"),
        "kv.commit:drop@0.004,kv.commit:duplicate@0.004,kv.commit:reorder@0.004,kv.commit:flip@0.008",
        "kv.commit:delay@0.01,kv.commit:stall@0.001,kv.commit:kill@0.0005",
        "kv.ack:drop@0.004,kv.ack:duplicate@0.004,kv.ack:reorder@0.004,kv.ack:delay@0.01,kv.ack:stall@0.001",
        "decode.reserve_reply:drop@0.004,decode.reserve_reply:delay@0.01,decode.reserve_reply:stall@0.001",
        "decode.reserve_reply:flip@0.006,decode.reserve_reply:kill@0.0005",
        "decode.stream:drop@0.001,decode.stream:duplicate@0.001,decode.stream:reorder@0.001",
        "decode.stream:delay@0.002,decode.stream:stall@0.0002,decode.stream:kill@0.00005",
        "index.call:drop@0.02,index.call:delay@0.02,index.call:stall@0.002",
    ]
)
GATEWAY_FAULTS = "index.call:drop@0.01,index.call:delay@0.01,index.call:stall@0.001"
FAULTS = {"prefill": PREFILL_FAULTS, "decode": DECODE_FAULTS, "gateway": GATEWAY_FAULTS}
# Waits that end soon, so that a run of bounded length meets many of them.
GATEWAY_FLAGS = (
    "--progress-timeout-s",
    "4",
    "--reconnect-wait-s",
    "30",
    "--max-retries",
    "4",
    "--log-level",
    "WARNING",
)


def environment(work_dir: Path) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("TWOSTROKE_", "OTEL_"))},
        "TWOSTROKE_STATE_DIR": str(work_dir / "state"),
        "TWOSTROKE_CACHE_DIR": os.environ.get("TWOSTROKE_CACHE_DIR", str(Path.home() / ".cache" / "twostroke")),
        "OTEL_SDK_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
    }


async def answers_without_faults(model: Path, work_dir: Path, cases: list[Case], limits: Limits) -> dict[int, Answer]:
    """Of one decode worker alone: no prefill worker, no transfer, no index, one request at a time in effect."""
    plan = Plan(model, work_dir / "reference", 0, 1, environment(work_dir), kv_memory_mib=4, has_redis=False)
    async with ChaosStack(plan) as stack:
        load = Load(stack.url, cases, {}, limits, seed=0)
        try:
            return {case.number: await load.ask(case, streams=False) for case in cases}
        finally:
            await load.close()


async def kill_now_and_then(stack: ChaosStack, kills: Counter[str], interval_s: float, seed: int) -> None:
    """Every service in turn, in an order of the seed; each comes back before its next turn."""
    draw = random.Random(seed)
    while True:
        for name in draw.sample(sorted(stack.services), len(stack.services)):
            await asyncio.sleep(interval_s * draw.uniform(0.5, 1.5))
            kills[name] += 1
            stack.kill(name)


async def leaked_blocks(stack: ChaosStack, start: dict[str, float]) -> dict[str, float]:
    """worker -> blocks that it lacks, once everyone has had the time to let go. Empty: all are back."""
    until_s = time.monotonic() + SETTLE_S
    async with httpx.AsyncClient(base_url=stack.url) as client:
        while True:
            try:
                loads = await worker_loads(client)
            except httpx.HTTPError:
                loads = {}
            lacking = {worker: start[worker] - loads.get(worker, {}).get("free_blocks", 0.0) for worker in start}
            lacking = {worker: count for worker, count in lacking.items() if count}
            if not lacking or time.monotonic() > until_s:
                return lacking
            await asyncio.sleep(0.2)


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

        def goes_on(totals: Totals) -> bool:
            return totals.requests < options.requests and time.monotonic() - began_s < options.max_s

        await load.run(options.concurrency, goes_on)
        wall_s = time.monotonic() - began_s
        killer.cancel()
        progress.cancel()
        await load.close()
        await stack.until_ready()
        leaked = await leaked_blocks(stack, start)
        await asyncio.gather(killer, progress, return_exceptions=True)
        settings = {key: value for key, value in vars(options).items() if key != "out"} | {"faults_at": faults}
        injected, defects = stack.injected(), stack.defects()
        return Outcome(load.totals, options.seed, wall_s, injected, kills, leaked, defects, options.requests, settings)


async def _show_progress(totals: Totals, began_s: float) -> None:
    while True:
        await asyncio.sleep(10)
        print(
            f"  {time.monotonic() - began_s:5.0f} s: {totals.requests} requests, {len(totals.wrong)} wrong, "
            f"{len(totals.hangs)} hangs, {sum(totals.failed.values())} failed",
            flush=True,
        )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...", description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000, help="how many requests at least")
    parser.add_argument("--max-s", type=float, default=1_200.0, help="no new request after this time")
    parser.add_argument("--concurrency", type=int, default=24, help="clients at once")
    parser.add_argument("--cases", type=int, default=300, help="different requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--hang-s", type=float, default=120.0)
    parser.add_argument("--kill-interval-s", type=float, default=10.0, help="time between two kill -9")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(argv)


def main() -> int:
    options = parse(sys.argv[1:])
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
