"""Quantized weights in the cache: the bits of weights quantized just now, made once, and made again when damaged."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from common.config import cache_dir
from common.errors import ModelLoadError
from common.kv.layout import KVFormat
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.quantized_model import QUANTIZED_WEIGHTS, load_quantized, prepare_quantized
from common.model.rotation import RotatedModel, rotate
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from tests.support.paged_generation import make_cache, make_sequences, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
PROMPT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0)).tolist()
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama in bf16, no rotation of V": ("llama", {"dtype": "bfloat16", "head_dim": 24}),
    "mistral untied": ("mistral", {"tie_word_embeddings": False}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3 untied, biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
}


def prepare_tiny(root: Path, family: str, **overrides: Any) -> PreparedModel:
    return prepare_model(str(make_tiny_model(root / "tiny", family, **overrides)), root / "cache", lambda _: None)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    family, overrides = request.param
    return prepare_tiny(tmp_path_factory.mktemp("quantized"), family, **overrides)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_tiny(tmp_path_factory.mktemp("llama"), "llama")


def silent(line: str) -> None:
    pytest.fail(f"unexpected progress: {line}")


def logits(model: RotatedModel) -> torch.Tensor:
    ops = select(CPU, "cpu", cache_dir())
    transformer = Transformer(model.config, model.weights, ops, CPU, Numerics.INT8, down_block=model.down_block)
    runner = ModelRunner(transformer, make_cache(model.config, KVFormat.INT8, [len(PROMPT)], CPU))
    (sequence,) = sequences = make_sequences([PROMPT], 0, runner.cache)
    prefill(runner, sequences, 64, keep_all=True)
    return torch.stack(sequence.logits)


def test_the_same_bits_as_quantized_just_now(prepared: PreparedModel, tmp_path: Path) -> None:
    fresh = rotate(prepared.config, load_weights(prepared, CPU))
    expected = logits(fresh)
    lines: list[str] = []
    made = load_quantized(prepared, tmp_path, CPU, lines.append)
    assert ["quantizing tiny (about 1 s, once)" in line for line in lines] == [True, False]
    opened = load_quantized(prepared, tmp_path, CPU, silent)
    for model in (made, opened):
        assert replace(model, weights=fresh.weights) == fresh
        assert torch.equal(logits(model), expected)


def test_every_matrix_but_the_embedding_is_int8(prepared: PreparedModel, tmp_path: Path) -> None:
    weights = load_quantized(prepared, tmp_path, CPU, lambda _: None).weights
    products = {name for name, weight in weights.items() if weight.dtype == torch.int8}
    layers = [f"model.layers.{index}" for index in range(prepared.config.num_layers)]
    attention = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert products == {"lm_head.weight", *(f"{layer}.{part}" for layer in layers for part in (*attention, *mlp))}
    assert all(weights[f"{name}_scales"].shape == weights[name].shape[:1] for name in products)
    assert all(weights[name].dtype == torch.float32 for name in weights.keys() - products)


def change_one_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte": change_one_byte,
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_made_again(llama: PreparedModel, tmp_path: Path, damage: str) -> None:
    file = prepare_quantized(llama, tmp_path, lambda _: None) / QUANTIZED_WEIGHTS
    expected = file.read_bytes()
    DAMAGES[damage](file)
    lines: list[str] = []
    assert prepare_quantized(llama, tmp_path, lines.append) == file.parent
    assert "is damaged" in lines[0]
    assert "quantizing" in lines[1]
    assert file.read_bytes() == expected


def test_whatever_the_weights_depend_on_has_an_entry_of_its_own(llama: PreparedModel, tmp_path: Path) -> None:
    """The width of a head is in no weight: twice as many heads of half the width have the same shapes."""
    config = llama.config
    narrow = replace(
        config, num_heads=2 * config.num_heads, num_kv_heads=2 * config.num_kv_heads, head_dim=config.head_dim // 2
    )
    models = (llama, replace(llama, config=narrow), replace(llama, weights_digest=bytes(32)))
    assert len({prepare_quantized(model, tmp_path, lambda _: None) for model in models}) == 3


def test_weights_that_cannot_be_written_are_named(llama: PreparedModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelLoadError, match=rf"cannot keep the prepared model in {tmp_path}/models"):
        prepare_quantized(llama, tmp_path, lambda _: None)


PROGRAM = """
import sys
from pathlib import Path
from common.model.loading import prepare_model
from common.model.quantized_model import prepare_quantized

def say(line):
    print(line.split()[0], flush=True)

source, cache = sys.argv[1], Path(sys.argv[2])
prepare_quantized(prepare_model(source, cache, say), cache, say)
say("opened")
"""


def test_of_two_processes_one_quantizes_and_the_other_waits_for_its_result(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = prepare_quantized(prepare_tiny(tmp_path, "llama"), cache, lambda _: None)
    shutil.rmtree(entry)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tiny"), str(cache)]
    # Both are held at the lock until both have come to it, so that they meet there however slowly they start.
    with FileLock(f"{entry}.lock"):
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
    outputs = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert outputs == ["opened\n", "quantizing\nquantized\nopened\n"]
    assert (entry / QUANTIZED_WEIGHTS).exists()
