"""Where the time of a compiled step goes: milliseconds of each kind of phase, for some shapes of batches.

`python -m bench.step_phases`. The least of many steps, as the first thread saw them: its waiting is in the phases.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.assembly import LoadedModel, load_model
from common.model.batch import ScheduledTokens
from common.model.compiled_transformer import CompiledTransformer

_BLOCK_SIZE = 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.step_phases", description=__doc__)
    parser.add_argument("--model", default="default", help="a .gguf file, a Hugging Face folder, or `default`")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--steps", type=int, default=15, help="steps of each shape; prompts take a third of them")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = _load(arguments.model)
    report = {name: _measure(model, entries, arguments.steps) for name, entries in _shapes().items()}
    for name, phases in report.items():
        parts = ", ".join(f"{phase} {ms:.2f}" for phase, ms in phases.items() if phase != "total")
        print(f"{name:22}{phases['total']:9.2f} ms: {parts}")
    print(json.dumps({"threads": torch.get_num_threads(), "backend": model.ops.description, "ms": report}))
    return 0


def _load(source: str) -> LoadedModel:
    return load_model(
        source=source,
        cache_dir=cache_dir(),
        device="cpu",
        backend="cpu",
        numerics="int8",
        kv_format=KVFormat.INT8,
        block_size=_BLOCK_SIZE,
        kv_memory_bytes=512 << 20,
        max_model_len=None,
        progress=lambda line: print(line, file=sys.stderr),
    )


def _shapes() -> dict[str, list[ScheduledTokens]]:
    decodes = ((1, 160), (1, 4095), (8, 160), (16, 300), (32, 128), (16, 1024))
    prompts = ((128, 0), (512, 0), (512, 3584))
    shapes = {f"decode {count} x {context}": _decodes(count, context) for count, context in decodes}
    return shapes | {f"prompt {count} at {start}": [_chunk(count, start)] for count, start in prompts}


def _decodes(count: int, context: int) -> list[ScheduledTokens]:
    blocks = context // _BLOCK_SIZE + 1
    return [ScheduledTokens([100 + i], context, range(i * blocks, (i + 1) * blocks), 1) for i in range(count)]


def _chunk(count: int, start: int) -> ScheduledTokens:
    tokens = [100 + i % 1000 for i in range(count)]
    return ScheduledTokens(tokens, start, range(-(-(start + count) // _BLOCK_SIZE)), 1)


def _fill(model: LoadedModel, entries: list[ScheduledTokens]) -> None:
    """Blocks that were never written are one page of zeros to the system, which never leaves the first cache."""
    num_blocks = max(block for entry in entries for block in entry.block_ids) + 1
    for layer in model.runner.cache.layers:
        for values, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            assert scales is not None
            values[:num_blocks].random_(-127, 128)
            scales[:num_blocks].fill_(1 / 64)


def _measure(model: LoadedModel, entries: list[ScheduledTokens], steps: int) -> dict[str, float]:
    """Of the quickest step; phases below a hundredth of it are left out."""
    from kernels.cpu.step import CompiledStep  # compiled code can be imported only once a model has loaded it

    forward_pass = model.runner.transformer
    assert isinstance(forward_pass, CompiledTransformer)
    step = forward_pass.step
    assert isinstance(step, CompiledStep)
    num_steps = steps if len(entries[0].token_ids) == 1 else max(1, steps // 3)
    _fill(model, entries)
    model.runner.run(entries)
    best: tuple[float, dict[str, int]] | None = None
    for _ in range(num_steps):
        step.measure()
        started = time.perf_counter()
        model.runner.run(entries)
        elapsed = time.perf_counter() - started
        if best is None or elapsed < best[0]:
            best = elapsed, step.times()
    assert best is not None
    total_ms, ticks = 1000 * best[0], sum(best[1].values())
    shares = {phase: total_ms * part / ticks for phase, part in best[1].items()}
    return {"total": total_ms} | {phase: ms for phase, ms in shares.items() if ms > total_ms / 100}


if __name__ == "__main__":
    sys.exit(main())
