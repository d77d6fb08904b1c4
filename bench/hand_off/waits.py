"""What a client of a local 1p1d stack waits because of the hand-off: streamed requests, one at a time."""

import asyncio
from collections.abc import Sequence
from statistics import median

import httpx

from bench.hand_off.processes import BenchFailed
from bench.hand_off.report import Waits
from bench.replay.client import ClientSettings, ReplayClient
from bench.replay.local import local_stack
from bench.replay.prompts import PromptMaker
from bench.replay.record import RequestRecord
from bench.replay.refusals import State, refusals
from bench.replay.server_metrics import change
from bench.replay.trace import Arrivals, PlannedRequest, Segment, Trace

TIMEOUT_S = 300.0
SETTLE_S = 1.0
"""After which the workers' totals have reached the gateway."""


def measure_waits(
    stack_arguments: Sequence[str], lengths: Sequence[int], num_requests: int, num_output_tokens: int, seed: int
) -> list[Waits]:
    """`num_requests` of each length, in turn, each with a prompt that nobody has seen. Raises BenchFailed, or
    StackFailed of bench.replay.local."""
    planned = [
        PlannedRequest(0.0, num_output_tokens, (Segment(f"{length}/{number}", length),))
        for number in range(num_requests)
        for length in lengths
    ]
    trace = Trace(seed, Arrivals.CLOSED, 1, tuple(planned))
    with local_stack("1p1d", stack_arguments) as url:
        records = asyncio.run(_ask_all(url, trace, num_warm_up=len(lengths)))
    return [_waits(length, [each for each in records if each.num_input_tokens == length]) for length in lengths]


async def _ask_all(url: str, trace: Trace, num_warm_up: int) -> list[RequestRecord]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        client = ReplayClient(http, ClientSettings(model, TIMEOUT_S), PromptMaker(trace.seed))
        warm_up = await client.warm_up(trace, num_warm_up)
        await asyncio.sleep(SETTLE_S)
        before = (await http.get("/metrics")).text
        records = await client.replay(trace)
        await asyncio.sleep(SETTLE_S)
        after = (await http.get("/metrics")).text
    reasons = refusals(records, warm_up, State.WARM, change(before, after), allows_errors=False)
    reasons += [f"a prompt of {each.num_input_tokens} tokens moved no KV" for each in records if not each.kv_bytes]
    if reasons:
        raise BenchFailed("; ".join(reasons))
    return records


def _waits(num_tokens: int, records: Sequence[RequestRecord]) -> Waits:
    waits = Waits(num_tokens)
    for record in records:
        gaps_s = record.gaps_s
        if len(gaps_s) + 1 != record.num_output_tokens or record.ttft_s is None or record.exposed_transfer_s is None:
            continue  # a token without text of its own shares an event: the second event is not the second token
        waits.ttft_s.append(record.ttft_s)
        waits.exposed_s.append(record.exposed_transfer_s)
        waits.second_token_s.append(gaps_s[0])
        waits.tpot_s.append(median(gaps_s[1:]))
    if len(waits.ttft_s) < (len(records) + 1) // 2:
        raise BenchFailed(f"only {len(waits.ttft_s)} of {len(records)} answers had an event for each token")
    return waits
