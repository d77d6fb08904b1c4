"""Milliseconds of decode steps and of a prompt, reference numerics against int8: interleaved, in one process.

The machine may be shared: times are the least of all rounds, ratios the medians of each round's.
`python -m bench.numerics_speed`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.assembly import LoadedModel, load_model
from common.model.batch import ScheduledTokens
from common.model.linear import Numerics

_CONTEXT = 160
_PROMPT = 512
_NUMS_SEQUENCES = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.numerics_speed", description=__doc__)
    parser.add_argument("--model", default="default", help="a .gguf file, a Hugging Face folder, or `default`")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each step")
    arguments = parser.parse_args(argv)
    models = {numerics: _load(arguments.model, numerics) for numerics in Numerics}
    report = {name: _measure(models, scheduled, arguments.rounds) for name, scheduled in _steps().items()}
    print(f"{'step':24}{'reference ms':>14}{'int8 ms':>10}{'ratio':>8}")
    for name, times in report.items():
        print(f"{name:24}{times['reference']:14.2f}{times['int8']:10.2f}{times['ratio']:8.2f}")
    print(json.dumps({"threads": torch.get_num_threads(), "backend": models[Numerics.INT8].ops.description} | report))
    return 0


def _load(source: str, numerics: Numerics) -> LoadedModel:
    model = load_model(
        source=source,
        cache_dir=cache_dir(),
        device="cpu",
        backend="cpu",
        numerics=numerics,
        kv_format=KVFormat.INT8,
        block_size=16,
        kv_memory_bytes=256 << 20,
        max_model_len=1024,
        progress=lambda line: print(line, file=sys.stderr),
    )
    model.warm_up()
    return model


def _steps() -> dict[str, list[ScheduledTokens]]:
    blocks_each = _CONTEXT // 16 + 1
    steps = {
        f"decode {count} x {_CONTEXT}": [
            ScheduledTokens([100 + i], _CONTEXT, range(i * blocks_each, (i + 1) * blocks_each), 1) for i in range(count)
        ]
        for count in _NUMS_SEQUENCES
    }
    prompt = [ScheduledTokens([100 + i % 1000 for i in range(_PROMPT)], 0, range(_PROMPT // 16), 1)]
    return steps | {f"prompt of {_PROMPT}": prompt}


def _measure(models: dict[Numerics, LoadedModel], scheduled: list[ScheduledTokens], rounds: int) -> dict[str, float]:
    """The least ms of each path, and the median ratio of int8 to reference, the two taking turns."""
    times: dict[Numerics, list[float]] = {numerics: [] for numerics in models}
    for _ in range(rounds + 1):
        for numerics, model in models.items():
            times[numerics].append(_elapsed_ms(partial(model.runner.run, scheduled)))
    reference, int8 = times[Numerics.REFERENCE][1:], times[Numerics.INT8][1:]
    ratio = median(b / a for a, b in zip(reference, int8, strict=True))
    return {"reference": min(reference), "int8": min(int8), "ratio": ratio}


def _elapsed_ms(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
