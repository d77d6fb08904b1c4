"""What every way of running chaos has in common: faults, environment, right answers, the count of blocks."""

import asyncio
import os
import time
from pathlib import Path

import httpx

from tests.chaos.cases import Answer, Case
from tests.chaos.load import Limits, Load
from tests.chaos.stack import ChaosStack, Plan, worker_loads

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
