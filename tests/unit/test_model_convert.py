"""GGUF files: the same model as the folder they were written from, and as transformers reads from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.errors import ModelLoadError
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.weights import load_weights
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, EOS_ID, make_tiny_model

CPU = torch.device("cpu")
TEXT = "The engine takes 10 prompts;   and  2  more. Größe 漢字\n\n    def f(x): return x1 + 123"

Prepare = Callable[[Path], PreparedModel]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def prepare(cache: Path) -> Prepare:
    return lambda path: prepare_model(str(path), cache, lambda _line: None)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied, grouped heads": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with another theta and wide heads": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "head_dim": 32},
    ),
    "mistral": ("mistral", {"tie_word_embeddings": False}),  # its files are of the architecture llama
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_file_gives_the_folder_s_model(model: str, tmp_path: Path, prepare: Prepare) -> None:
    family, overrides = MODELS[model]
    folder = make_tiny_model(tmp_path / "tiny", family, **overrides)
    architecture = "llama" if family == "mistral" else family
    file = write_tiny_gguf(tmp_path / "tiny.gguf", folder, architecture=architecture)
    from_folder, from_file = prepare(folder), prepare(file)
    expected, found = load_weights(from_folder, CPU), load_weights(from_file, CPU)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    differing = {
        field
        for field in ("name", "num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings", "qkv_bias", "output_bias",
                      "mlp_bias", "qk_norm", "rope_inv_freq", "rope_attention_scale", "layer_windows", "vocab_size",
                      "max_model_len", "eos_token_ids", "bos_token_id")
        if getattr(from_file.config, field) != getattr(from_folder.config, field)
    }  # fmt: skip
    assert not differing
    # the file holds it in fp32
    assert from_file.config.rms_norm_eps == np.float32(from_folder.config.rms_norm_eps)


@pytest.mark.parametrize("quantization", ["F16", "Q8_0", "Q4_1"])
def test_quantized_weights_have_the_bits_that_transformers_gives_them(
    quantization: str, tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama", tie_word_embeddings=False)
    file = write_tiny_gguf(tmp_path / f"tiny.{quantization}.gguf", folder, quantization=quantization)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    ).state_dict()
    ours = load_weights(prepare(file), CPU)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_tokenizer_comes_along(tmp_path: Path, prepare: Prepare) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    prepared = prepare(write_tiny_gguf(tmp_path / "tiny.gguf", folder))
    ours = Tokenizer.from_buffer(prepared.tokenizer_files["tokenizer.json"])
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.encode(TEXT).ids == theirs.encode(TEXT).ids
    chat = "<|im_start|>user\nhello<|im_end|>\n"
    assert ours.encode(chat).ids == theirs.encode(chat).ids
    meta = json.loads(prepared.tokenizer_files["tokenizer_meta.json"])
    assert meta["chat_template"] == CHAT_TEMPLATE
    assert meta["special_token_ids"] == [0, 1, 2]


def test_the_end_of_a_turn_ends_generation_too(tmp_path: Path, prepare: Prepare) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    file = write_tiny_gguf(tmp_path / "tiny.gguf", folder, metadata={"tokenizer.ggml.eot_token_id": 2})
    assert prepare(file).config.eos_token_ids == (EOS_ID, 2)


def test_smollm_s_digits_stand_alone(tmp_path: Path, prepare: Prepare) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    prepared = prepare(write_tiny_gguf(tmp_path / "tiny.gguf", folder, pre_tokenizer="smollm"))
    tokenizer = Tokenizer.from_buffer(prepared.tokenizer_files["tokenizer.json"])
    assert tokenizer.encode("x  1000").tokens == ["x", "ĠĠ", "1", "0", "0", "0"]


def test_the_frequencies_that_a_file_carries_are_heeded(tmp_path: Path, prepare: Prepare) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    folder = make_tiny_model(tmp_path / "tiny", "llama", rope_parameters=llama3)
    wanted = np.array(prepare(folder).config.rope_inv_freq, dtype=np.float32)
    plain = np.array(prepare(make_tiny_model(tmp_path / "plain", "llama")).config.rope_inv_freq, dtype=np.float32)
    divisors = {"rope_freqs.weight": plain / wanted}
    found = prepare(write_tiny_gguf(tmp_path / "tiny.gguf", folder, extra_tensors=divisors)).config.rope_inv_freq
    # one rounding of the quotient, one of the division by it
    np.testing.assert_allclose(found, wanted, rtol=2 * np.finfo(np.float32).eps)
    assert not np.allclose(found, plain)


def test_linear_scaling_is_heeded(tmp_path: Path, prepare: Prepare) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    folder = make_tiny_model(tmp_path / "tiny", "llama", rope_parameters=linear)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = prepare(write_tiny_gguf(tmp_path / "tiny.gguf", folder, metadata=metadata))
    assert found.config.rope_inv_freq == prepare(folder).config.rope_inv_freq


ONE_ROW = np.zeros(96, dtype=np.float32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "gemma3"}, "'gemma3' is not supported; supported: llama, qwen2, qwen3"),
    "yarn": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
    "window": ({"metadata": {"llama.attention.sliding_window": 64}}, "a sliding window"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "a mixture of experts"),
    "one part of several": ({"metadata": {"split.count": 3}}, "one of 3 parts"),
    "no head count": ({"omit": ("llama.attention.head_count_kv",)}, "does not say llama.attention.head_count_kv"),
    "missing embedding": ({"omit": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
    "missing tensor": ({"omit": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing"),
    "unknown tensor": ({"extra_tensors": {"blk.0.ffn_gate_inp.weight": ONE_ROW}}, "blk.0.ffn_gate_inp.weight"),
    "half a bias": ({"extra_tensors": {"blk.1.attn_q.bias": ONE_ROW}}, "blk.1.attn_q.bias"),
    "misshapen": ({"metadata": {"llama.feed_forward_length": 128}}, "blk.0.ffn_gate.weight has shape (96, 64)"),
    "heads that do not divide": ({"metadata": {"llama.attention.head_count_kv": 3}}, "4 query heads cannot share 3"),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "pre-tokenizer None"),
    "pre-tokenizer": ({"pre_tokenizer": "viking"}, "pre-tokenizer 'viking'"),
    "frequencies of another size": ({"extra_tensors": {"rope_freqs.weight": ONE_ROW}}, "reading the configuration"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_named(case: str, tmp_path: Path, prepare: Prepare, cache: Path) -> None:
    arguments, reason = REFUSALS[case]
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    file = write_tiny_gguf(tmp_path / "refused.gguf", folder, **arguments)
    with pytest.raises(ModelLoadError) as raised:
        prepare(file)
    assert reason in str(raised.value)
    assert str(file) in str(raised.value)
    assert not any(path.is_dir() and "refused" in path.name for path in (cache / "models").iterdir())


def test_a_damaged_conversion_is_noticed_and_made_again(tmp_path: Path, cache: Path) -> None:
    file = write_tiny_gguf(tmp_path / "harmed.gguf", make_tiny_model(tmp_path / "tiny", "llama"))
    lines: list[str] = []
    first = prepare_model(str(file), cache, lines.append)
    weights = first.weight_files[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert prepare_model(str(file), cache, lines.append) == first
    assert prepare_model(str(file), cache, lines.append) == first
    assert [line.split()[0] for line in lines] == ["converting", "converted", "the", "converting", "converted"]
    assert "model.safetensors has another checksum" in lines[2]


def test_a_changed_file_is_another_model(tmp_path: Path, prepare: Prepare) -> None:
    folders = [make_tiny_model(tmp_path / f"tiny{seed}", "llama", seed=seed) for seed in (0, 1)]
    digests = [prepare(write_tiny_gguf(tmp_path / "tiny.gguf", folder)).weights_digest for folder in folders]
    assert digests[0] != digests[1]


def test_a_file_cut_short_is_named(tmp_path: Path, prepare: Prepare) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_model(tmp_path / "tiny", "llama"))
    file.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is cut short"):
        prepare(file)
