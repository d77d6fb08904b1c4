"""A model's logits are the same bits on every kind of CPU that this one can stand in for."""

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

from tests.support.tiny_models import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
KINDS = {
    "AMX": (),
    "AVX-512 with VNNI": ("amx",),
    "AVX2": ("amx", "avx512", "avx10", "avxvnni"),
}
"""The features that a kind lacks, by how LLVM's names begin."""

DIGEST_OF_LOGITS = """
import hashlib, sys
from pathlib import Path
import torch
from common.kv.layout import KVFormat
from common.model.assembly import load_transformer
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.runner import ModelRunner
from kernels.ops import select
from tests.support.paged_generation import compute, make_cache, make_sequences, prefill

model, cache, kernels = sys.argv[1:]
ops = select(torch.device("cpu"), "cpu", Path(kernels))
prepared = prepare_model(model, Path(cache), lambda _: None)
loaded = load_transformer(prepared, Path(cache), ops, torch.device("cpu"), Numerics.INT8, 512, lambda _: None)
digest = hashlib.sha256()
for kv_format in KVFormat:
    kv = make_cache(prepared.config, kv_format, [330, 40, 7], torch.device("cpu"))
    sequences = make_sequences([list(range(5, 5 + n)) for n in (320, 33, 1)], 4, kv)
    runner = ModelRunner(loaded.forward_pass, kv)
    prefill(runner, sequences, 128, keep_all=True)
    for _ in range(3):
        for sequence in sequences:
            sequence.token_ids.append(int(sequence.logits[-1].argmax()))
        compute(runner, sequences, [1, 1, 1], keep_all=True)
    for sequence in sequences:
        digest.update(torch.stack(sequence.logits).numpy().tobytes())
print(ops.product_description, digest.hexdigest(), sep="\\n")
"""


def features_without(beginnings: tuple[str, ...]) -> str:
    features = llvmlite.binding.get_host_cpu_features()
    on = {name: has and not name.startswith(beginnings) for name, has in features.items()}
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(on.items()))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_same_logits(tmp_path: Path) -> None:
    """Compiles all kernels for each kind: minutes. One preparation serves all, as workers share a cache."""
    model = str(make_tiny_model(tmp_path / "tiny", "llama"))
    found = {}
    for kind, missing in KINDS.items():
        environment = {**os.environ, "NUMBA_CPU_FEATURES": features_without(missing)}
        command = [sys.executable, "-c", DIGEST_OF_LOGITS, model, str(tmp_path / "cache"), str(tmp_path / kind)]
        run = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
        assert run.returncode == 0, f"{kind}: {run.stderr}"
        found[kind] = tuple(run.stdout.split("\n")[:2])
    descriptions = {description for description, _ in found.values()}
    assert len(descriptions) > 1, f"all kinds use the same products, which shows nothing: {descriptions}"
    assert len({digest for _, digest in found.values()}) == 1, found
