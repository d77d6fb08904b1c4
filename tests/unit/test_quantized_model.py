"""Quantized weights in the cache: calibrated, made once, the same every time, and made again when damaged."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from common.config import cache_dir
from common.errors import ModelLoadError
from common.kv.layout import KVFormat
from common.model import quantized_model
from common.model.calibration.calibrated_weights import layer_to_round, nearest_weights
from common.model.calibration.layer_inputs import LayerRunner
from common.model.calibration.offsets import centred
from common.model.calibration.token_ids import calibration_sequences
from common.model.int8_product import QuantizedWeight, quantize_weight
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.quantized_model import QUANTIZED_WEIGHTS, load_quantized, prepare_quantized
from common.model.rotation import RotatedModel, rotate
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weight_rounding import second_moments
from common.model.weights import load_weights
from kernels.ops import select
from kernels.quantized import row_quantizer
from tests.support.output_error import squared_error
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


def quietly(line: str) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _kernels_compiled() -> None:
    """The first import in a process decides where compiled kernels are kept; a test's own folder would be empty."""
    select(CPU, "cpu", cache_dir())


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits(model: RotatedModel) -> torch.Tensor:
    ops = select(CPU, "cpu", cache_dir())
    transformer = Transformer(model.config, model.weights, ops, CPU, Numerics.INT8, down_block=model.down_block)
    runner = ModelRunner(transformer, make_cache(model.config, KVFormat.INT8, [len(PROMPT)], CPU))
    (sequence,) = sequences = make_sequences([PROMPT], 0, runner.cache)
    prefill(runner, sequences, 64, keep_all=True)
    return torch.stack(sequence.logits)


def test_made_once_and_then_opened(prepared: PreparedModel, tmp_path: Path) -> None:
    lines: list[str] = []
    made = load_quantized(prepared, tmp_path, CPU, lines.append)
    assert ["quantizing tiny (about 1 s, once)" in line for line in lines] == [True, False]
    opened = load_quantized(prepared, tmp_path, CPU, silent)
    assert made.name == opened.name
    assert torch.equal(logits(made.rotated), logits(opened.rotated))


def test_every_product_errs_less_on_the_calibration_text_than_rounded_to_nearest(
    prepared: PreparedModel, tmp_path: Path
) -> None:
    rotated, sequences = rotate(prepared.config, load_weights(prepared, CPU)), calibration_sequences(prepared)
    calibrated = load_quantized(prepared, tmp_path, CPU, quietly).rotated
    assert replace(calibrated, weights=rotated.weights) == rotated
    ops = select(CPU, "cpu", cache_dir())
    runner = LayerRunner(rotated.config, rotated.down_block, ops, sequences)
    tokens = torch.tensor([token_id for sequence in sequences for token_id in sequence])
    residual = rotated.weights["model.embed_tokens.weight"][tokens]
    for layer in range(rotated.config.num_layers):
        prefix = f"model.layers.{layer}."
        weights = {n.removeprefix(prefix): rotated.weights[n] for n in rotated.weights if n.startswith(prefix)}
        run = runner.run(layer, dict(nearest_weights(weights)), residual)
        balanced = layer_to_round(rotated, weights, run, ops)
        for product, moments in balanced.moments.items():
            errs_less(balanced.weights[f"{product}.weight"], calibrated.weights, f"{prefix}{product}.weight", moments)
        residual = run.residual
    of_head = centred(run.head_input, row_quantizer(ops))
    assert of_head is not None
    moments = second_moments(of_head.rows, ops)
    errs_less(rotated.weights["lm_head.weight"], calibrated.weights, "lm_head.weight", moments)


def errs_less(
    weight: torch.Tensor, calibrated: Mapping[str, torch.Tensor], name: str, moments: torch.Tensor | None
) -> None:
    assert moments is not None
    made = QuantizedWeight(calibrated[name], calibrated[f"{name}_scales"])
    errors = [squared_error(weight, quantized, moments) for quantized in (made, quantize_weight(weight))]
    assert errors[0] < 0.95 * errors[1], name


def test_the_number_of_threads_changes_no_weight(llama: PreparedModel, tmp_path: Path) -> None:
    names = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        names.append(load_quantized(llama, tmp_path / str(num_threads), CPU, quietly).name)
    assert names[0] == names[1]


def test_a_tokenizer_that_makes_too_little_of_the_text_is_named(llama: PreparedModel, tmp_path: Path) -> None:
    tokenizer = json.loads(llama.tokenizer_files["tokenizer.json"])
    tokenizer["model"] |= {"vocab": {"never": 0}, "merges": []}
    mute = replace(
        llama, tokenizer_files={"tokenizer.json": json.dumps(tokenizer).encode()}, tokenizer_digest=bytes(32)
    )
    lines: list[str] = []
    weights = load_quantized(mute, tmp_path, CPU, lines.append).rotated.weights
    assert any("rounded to nearest" in line and "only 0 tokens" in line for line in lines)
    nearest = dict(nearest_weights(rotate(llama.config, load_weights(llama, CPU)).weights))
    assert weights.keys() == nearest.keys()
    assert all(torch.equal(weights[name], nearest[name]) for name in nearest)


def test_every_matrix_but_the_embedding_is_int8(prepared: PreparedModel, tmp_path: Path) -> None:
    weights = load_quantized(prepared, tmp_path, CPU, quietly).rotated.weights
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
    file = prepare_quantized(llama, tmp_path, quietly) / QUANTIZED_WEIGHTS
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
    models = (
        llama,
        replace(llama, config=narrow),
        replace(llama, weights_digest=bytes(32)),
        replace(llama, tokenizer_digest=bytes(32)),
    )
    assert len({prepare_quantized(model, tmp_path, quietly) for model in models}) == 4


@pytest.mark.parametrize("part", ["ROTATION", "ROUNDING", "text_digest"])
def test_another_way_of_making_them_has_another_entry(
    llama: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    before = prepare_quantized(llama, tmp_path, quietly)
    monkeypatch.setattr(quantized_model, part, (lambda: "other") if part == "text_digest" else "other")
    assert prepare_quantized(llama, tmp_path, quietly) != before


def test_weights_that_cannot_be_written_are_named(llama: PreparedModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelLoadError, match=rf"cannot keep the prepared model in {tmp_path}/models"):
        prepare_quantized(llama, tmp_path, quietly)


PROGRAM = """
import sys
from pathlib import Path
import torch
from common.config import cache_dir
from common.model.loading import prepare_model
from common.model.quantized_model import prepare_quantized
from kernels.ops import select

select(torch.device("cpu"), "cpu", cache_dir())

def say(line):
    print(line.split()[0], flush=True)

source, cache = sys.argv[1], Path(sys.argv[2])
prepare_quantized(prepare_model(source, cache, say), cache, say)
say("opened")
"""


def test_of_two_processes_one_quantizes_and_the_other_waits_for_its_result(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = prepare_quantized(prepare_tiny(tmp_path, "llama"), cache, quietly)
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
