"""Milliseconds of a decode step outside the model, at many sequences: scheduling, rows to sample, building the batch.

`python -m bench.step_overhead`. The least of many steps: the machine may be shared.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence as Arguments

import torch

from common.ids import BlockHash, RequestId, TransferId
from common.kv.block_pool import BlockPool
from common.model.batch import build_batch
from common.sampling import SamplingParams
from decode_svc.batch import row_ranges, sample_rows, scheduled_tokens
from decode_svc.scheduler import DecodeScheduler, SchedulerLimits
from decode_svc.sequence import Sequence

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192


def main(argv: Arguments[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.step_overhead", description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args(argv)
    scheduler = _filled(arguments.sequences, arguments.prompt, arguments.steps)
    parts = [_step(scheduler) for _ in range(arguments.steps)]
    least = {name: round(1000 * min(part[name] for part in parts), 3) for name in parts[0]}
    print(json.dumps({"sequences": arguments.sequences, "ms": least, "total_ms": round(sum(least.values()), 3)}))
    return 0


def _filled(num_sequences: int, num_prompt_tokens: int, num_steps: int) -> DecodeScheduler:
    """All prompts are computed, and each sequence has its first token."""
    blocks_each = -(-(num_prompt_tokens + num_steps + 2) // _BLOCK_SIZE)
    limits = SchedulerLimits(
        block_size=_BLOCK_SIZE,
        max_num_batched_tokens=num_sequences * num_prompt_tokens,
        max_num_sequences=num_sequences,
        max_waiting=num_sequences,
        preemption_shield_tokens=num_steps,
    )
    scheduler = DecodeScheduler(BlockPool(num_sequences * blocks_each), limits)
    for index in range(num_sequences):
        scheduler.add(
            Sequence(
                request_id=RequestId(f"request {index}"),
                transfer_id=TransferId(bytes(16)),
                prompt_token_ids=tuple(range(index, index + num_prompt_tokens)),
                sampling=SamplingParams(temperature=0.0, max_tokens=num_steps + 2),
                root_hash=BlockHash(index.to_bytes(32, "big")),
                arrived_s=0.0,
                max_model_len=_MAX_MODEL_LEN,
            )
        )
    _finish(scheduler)
    return scheduler


def _finish(scheduler: DecodeScheduler) -> None:
    """Schedules and completes a step, as if the model had run."""
    for entry in scheduler.schedule(0.0).scheduled:
        entry.sequence.append(7)
        scheduler.complete(entry, 0)
    scheduler.end_step()


def _step(scheduler: DecodeScheduler) -> dict[str, float]:
    marks = [time.perf_counter()]
    scheduled = scheduler.schedule(0.0).scheduled
    marks.append(time.perf_counter())
    build_batch([scheduled_tokens(entry) for entry in scheduled], _BLOCK_SIZE, torch.device("cpu"))
    marks.append(time.perf_counter())
    [row for entry in scheduled for row in sample_rows(entry)]
    row_ranges(scheduled)
    marks.append(time.perf_counter())
    for entry in scheduled:
        entry.sequence.append(7)
        scheduler.complete(entry, 0)
    scheduler.end_step()
    marks.append(time.perf_counter())
    names = ("schedule", "build batch", "rows to sample", "complete")
    return {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}


if __name__ == "__main__":
    sys.exit(main())
