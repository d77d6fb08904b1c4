"""Times the operations of a layer of SmolLM2's shape, per backend. `python -m bench.kernels_bench`; JSON out."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from common.config import cache_dir
from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.batch import ScheduledTokens, build_batch
from kernels.ops import Ops, select

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FFN, BLOCK_SIZE = 9, 3, 64, 576, 1536, 16
ATTENTION_SHAPES = [  # sequences, new tokens of each, context of each
    (1, 1, 160),
    (8, 1, 160),
    (32, 1, 192),
    (64, 1, 1024),
    (1, 1, 4096),
    (8, 5, 192),
    (1, 512, 512),
    (1, 512, 1536),
    (1, 512, 4096),
]
ROW_COUNTS = [1, 32, 512]


@dataclass(frozen=True, slots=True)
class Timing:
    op: str
    shape: str
    backend: str
    ms: float  # median
    gmac_per_s: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kernels_bench", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["reference", "cpu"])
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each figure")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    backends = [select(CPU, name, cache_dir()) for name in options.backends]
    timings = [asdict(timing) for ops in backends for timing in _measure(ops, options.seconds)]
    print(json.dumps({"backends": [ops.description for ops in backends], "timings": timings}, indent=1))
    return 0


def _measure(ops: Ops, seconds: float) -> Iterator[Timing]:
    for num_sequences, num_new, context_len in ATTENTION_SHAPES:
        attend = _attention(ops, num_sequences, num_new, context_len)
        pairs = num_sequences * sum(range(context_len - num_new + 1, context_len + 1))
        ms = _median_ms(attend, seconds)
        gmac = pairs * NUM_HEADS * 2 * HEAD_DIM / ms / 1e6
        yield Timing("paged_attention", f"{num_sequences}x{num_new} of {context_len}", ops.name, ms, gmac)
    for num_rows in ROW_COUNTS:
        for op, run in _row_operations(ops, num_rows).items():
            yield Timing(op, f"{num_rows} rows", ops.name, _median_ms(run, seconds))


def _attention(ops: Ops, num_sequences: int, num_new: int, context_len: int) -> Callable[[], object]:
    layout = KVLayout(KVFormat.INT8, BLOCK_SIZE, 1, NUM_KV_HEADS, HEAD_DIM)
    per_sequence = layout.num_blocks(context_len)
    cache = KVCache(layout, num_sequences * per_sequence, CPU)
    order = torch.randperm(cache.num_blocks).view(num_sequences, per_sequence).tolist()
    whole = build_batch([ScheduledTokens([0] * context_len, 0, ids, 1) for ids in order], BLOCK_SIZE, CPU)
    slots = whole.attention.slot_mapping
    k, v = torch.randn(2, slots.shape[0], NUM_KV_HEADS, HEAD_DIM)
    ops.write_kv(k, v, cache.layer(0), slots, torch.zeros(slots.shape[0], dtype=torch.int32))
    scheduled = [ScheduledTokens([0] * num_new, context_len - num_new, ids, 1) for ids in order]
    batch = build_batch(scheduled, BLOCK_SIZE, CPU).attention
    q = torch.randn(num_sequences * num_new, NUM_HEADS, HEAD_DIM)
    return lambda: ops.paged_attention(q, cache.layer(0), batch, HEAD_DIM**-0.5, 0)


def _row_operations(ops: Ops, num_rows: int) -> dict[str, Callable[[], object]]:
    layer = KVCache(KVLayout(KVFormat.INT8, BLOCK_SIZE, 1, NUM_KV_HEADS, HEAD_DIM), num_rows, CPU).layer(0)
    slots, nonfinite = torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int32)
    x, weight, gate_up = torch.randn(num_rows, HIDDEN), torch.randn(HIDDEN), torch.randn(num_rows, 2 * FFN)
    q, kv = torch.randn(num_rows, NUM_HEADS, HEAD_DIM), torch.randn(num_rows, NUM_KV_HEADS, HEAD_DIM)
    cos, sin = torch.randn(2, num_rows, HEAD_DIM // 2)
    return {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-5),
        "rope": lambda: ops.rope(q, cos, sin),
        "silu_mul": lambda: ops.silu_mul(gate_up),
        "write_kv": lambda: ops.write_kv(kv, kv, layer, slots, nonfinite),
    }


def _median_ms(run: Callable[[], object], seconds: float) -> float:
    run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        samples.append(1000 * (time.perf_counter() - start))
    return sorted(samples)[len(samples) // 2]


if __name__ == "__main__":
    sys.exit(main())
