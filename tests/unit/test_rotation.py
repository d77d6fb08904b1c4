"""Rotation computes the same function: of every family, and of the real model."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.config import ModelConfig
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.rotation import hadamard_factors, rotate, rotate_columns, rotate_rows
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from tests.support.paged_generation import make_cache, make_sequences, prefill
from tests.support.prepared_models import CONFIG
from tests.support.real_model import smollm2
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

__all__ = ["smollm2"]

CPU = torch.device("cpu")
PROMPTS = [
    torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 17, 40)
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama hidden size of an odd part": ("llama", {"hidden_size": 72, "intermediate_size": 80}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 untied, biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "head size of no power of two": ("llama", {"head_dim": 24}),
    "odd intermediate size": ("llama", {"intermediate_size": 81}),
}


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, overrides = request.param
    root = tmp_path_factory.mktemp("rotation")
    prepared = prepare_model(str(make_tiny_model(root / "tiny", family, **overrides)), root / "cache", lambda _: None)
    return Case(prepared.config, load_weights(prepared, CPU))


def logits(transformer: Transformer, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    runner = ModelRunner(transformer, make_cache(transformer.config, KVFormat.FP32, [len(p) for p in prompts], CPU))
    sequences = make_sequences(prompts, 0, runner.cache)
    prefill(runner, sequences, 64, keep_all=True)
    return torch.stack([row for sequence in sequences for row in sequence.logits])


def both(config: ModelConfig, weights: dict[str, torch.Tensor], *prompts: list[list[int]]) -> list[torch.Tensor]:
    ops, numerics = select(CPU, "cpu", cache_dir()), Numerics.REFERENCE
    rotated = rotate(config, weights)
    plain = Transformer(config, weights, ops, CPU, numerics)
    turned = Transformer(rotated.config, rotated.weights, ops, CPU, numerics, down_block=rotated.down_block)
    return [logits(plain, *prompts), logits(turned, *prompts)]


def test_logits_stay(case: Case) -> None:
    expected, actual = both(case.config, case.weights)
    # Logits are below 5; a change of basis rounds every weight and every sum anew, in fp32.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_logits_of_the_real_model_stay(smollm2: PreparedModel) -> None:
    prompts = [list(range(1000, 1048))]
    expected, actual = both(smollm2.config, load_weights(smollm2, CPU), prompts)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)  # thirty layers, logits of up to 30


def test_what_is_skipped_is_named(case: Case) -> None:
    rotated, config = rotate(case.config, case.weights), case.config
    has_v, has_down = config.head_dim == 16, config.intermediate_size != 81
    assert any("V of each head" in reason for reason in rotated.skipped) != has_v
    assert any("down projection" in reason for reason in rotated.skipped) != has_down
    assert any("K and Q of each head" in reason for reason in rotated.skipped) == config.qk_norm
    assert len(rotated.skipped) == 2 - has_v - has_down + config.qk_norm


def test_every_weight_is_there_in_its_shape(case: Case) -> None:
    rotated = rotate(case.config, case.weights)
    assert set(rotated.weights) == set(case.weights) | {"lm_head.weight"}
    assert len(rotated.weights) == len(list(rotated.weights))
    for name, weight in rotated.weights.items():
        source = case.weights.get(name, case.weights["model.embed_tokens.weight"])
        assert weight.shape == source.shape
        assert weight.dtype == torch.float32
        assert weight.is_contiguous()


def test_the_number_of_threads_changes_no_weight(case: Case) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = dict(rotate(case.config, case.weights).weights)
        torch.set_num_threads(2)
        two = dict(rotate(case.config, case.weights).weights)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_outliers_are_spread() -> None:
    """One value of 100 among 576 comes out as many of about 100 / sqrt(576)."""
    weights = {"model.embed_tokens.weight": 100 * torch.eye(576)[:3], "model.norm.weight": torch.ones(576)}
    spread = rotate(replace(CONFIG, hidden_size=576), weights).weights["model.embed_tokens.weight"]
    torch.testing.assert_close(spread.norm(dim=1), torch.full((3,), 100.0))
    assert spread.abs().max() < 12


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128, 512, 4096])
def test_hadamard_factors(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    y = rotate_rows(x, hadamard_factors(size))
    torch.testing.assert_close(rotate_rows(y, hadamard_factors(size)), x)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(rotate_columns(x.T, hadamard_factors(size)).T, y)
