"""Every family's forward pass over paged KV against transformers' own model, on small random configurations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.config import ModelConfig
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import Ops, select
from tests.support.paged_generation import compute, make_cache, make_sequences, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""Logits of these models are below 5 in magnitude; differences of up to 4e-6 come from fp32 sums in another order."""

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped heads, tied": ("llama", {}),
    "llama one head per group, untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama heads wider than the hidden size": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "mistral window of one block": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 window on the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen2 yarn rope": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 untied, biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3 window, linear rope": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "rope_parameters": LINEAR},
    ),
}

LENGTHS = (1, 15, 16, 17, 50, 83)
PROMPTS = [
    torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
NUM_DECODED = 9  # the last tokens of each prompt, given one at a time in the decode test


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    expected: list[torch.Tensor]  # transformers' logits [length, V] of each prompt


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, overrides = request.param
    root = tmp_path_factory.mktemp("family")
    folder = make_tiny_model(root / "tiny", family, **overrides)
    prepared = prepare_model(str(folder), root / "cache", lambda _: None)
    return Case(prepared.config, load_weights(prepared, CPU), transformers_logits(folder))


def transformers_logits(folder: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(CPU, request.param, cache_dir())


def runner_for(case: Case, ops: Ops) -> ModelRunner:
    transformer = Transformer(case.config, case.weights, ops, CPU, Numerics.REFERENCE)
    return ModelRunner(transformer, make_cache(case.config, KVFormat.FP32, LENGTHS, CPU))


def assert_close(logits: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.stack(list(logits)), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [max(LENGTHS), 7], ids=["whole", "chunks of 7"])
def test_prompts_together(case: Case, ops: Ops, chunk: int) -> None:
    """All prompts in one batch, every position's logits; shorter prompts leave the batch as they end."""
    runner = runner_for(case, ops)
    sequences = make_sequences(PROMPTS, 0, runner.cache)
    prefill(runner, sequences, chunk, keep_all=True)
    for sequence, expected in zip(sequences, case.expected, strict=True):
        assert_close(sequence.logits, expected)


def test_decode_steps(case: Case, ops: Ops) -> None:
    """Prompts but for their end, then one token of each in a step: decode in a batch of unequal contexts."""
    runner = runner_for(case, ops)
    long = [(prompt, expected) for prompt, expected in zip(PROMPTS, case.expected, strict=True) if len(prompt) > 9]
    sequences = make_sequences([prompt for prompt, _ in long], 0, runner.cache)
    compute(runner, sequences, [len(s.token_ids) - NUM_DECODED for s in sequences], keep_all=True)
    for _ in range(NUM_DECODED):
        compute(runner, sequences, [1] * len(sequences), keep_all=True)
    for sequence, (_, expected) in zip(sequences, long, strict=True):
        assert_close(sequence.logits, expected)
