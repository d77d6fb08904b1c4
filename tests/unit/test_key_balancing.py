"""Balanced keys: the same weights of attention, the same logits of every family, and less lost to int8."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from common.kv.layout import KVFormat
from common.model.calibration.key_balancing import KEY_OFFSET, KeyMoments, balanced_keys, key_moments
from common.model.config import ModelConfig
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from kernels.quantized import hadamard
from tests.support.paged_generation import make_cache, make_sequences, prefill
from tests.support.prepared_models import CONFIG
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
PROMPTS = [[7], list(range(40, 57))]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, heads of 24": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}
SHAPE = replace(CONFIG, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=False)
CHANGED = {f"self_attn.{product}.{part}" for product in ("q_proj", "k_proj") for part in ("weight", "bias")}


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, overrides = request.param
    root = tmp_path_factory.mktemp("keys")
    prepared = prepare_model(str(make_tiny_model(root / "tiny", family, **overrides)), root / "cache", lambda _: None)
    return Case(prepared.config, dict(load_weights(prepared, CPU)))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven_moments(config: ModelConfig, seed: int = 0) -> KeyMoments:
    """Of pairs some of which are ten times others, around means that are not zero."""
    sizes = 10 ** normal(1, config.num_kv_heads, config.head_dim, seed=seed).clamp(-1, 1)
    keys = (normal(50, config.num_kv_heads, config.head_dim, seed=seed + 1) * 0.3 + 1) * sizes
    moments = key_moments(keys.float(), normal(50, config.num_heads, config.head_dim, seed=seed + 2).float())
    assert moments is not None
    return moments


def uneven_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Rows of K that write a few large, steady values."""
    weights = {}
    for product, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        weights[f"self_attn.{product}.weight"] = normal(num_heads * config.head_dim, config.hidden_size, seed=3).float()
        weights[f"self_attn.{product}.bias"] = torch.zeros(num_heads * config.head_dim)
    weights["self_attn.k_proj.bias"][1 :: config.head_dim // 2] = 60.0
    return weights


def heads(weights: dict[str, torch.Tensor], product: str, x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """After rope at positions 0, 1, ...; fp64."""
    weight, bias = (weights[f"self_attn.{product}.{part}"].double() for part in ("weight", "bias"))
    pairs = torch.complex(*(x @ weight.T + bias).view(len(x), -1, config.head_dim).chunk(2, dim=-1))
    frequencies = 1 / 50 ** (torch.arange(config.head_dim // 2, dtype=torch.float64) / config.head_dim)
    turns = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(len(x)).double(), frequencies))
    turned = pairs * turns[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("thd,shd->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))


def kept(k: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Transformed, and less the offset, as keys are stored."""
    return hadamard(k, SHAPE.head_dim) - weights[KEY_OFFSET].double().view(k.shape[1:])


def to_int8_and_back(x: torch.Tensor) -> torch.Tensor:
    steps = x.abs().amax(-1, keepdim=True) / 127
    return (x / steps).round() * steps


def differences(scores: torch.Tensor) -> torch.Tensor:
    """What attention sees of scores: they may all be more or less by the same."""
    return scores - scores.mean(-1, keepdim=True)


def test_weights_of_attention_stay_at_all_positions_and_lose_less_to_int8() -> None:
    weights, x = uneven_weights(SHAPE), normal(40, SHAPE.hidden_size, seed=4)
    q, k = (heads(weights, product, x, SHAPE) for product in ("q_proj", "k_proj"))
    after = balanced_keys(SHAPE, weights, key_moments(k.float(), q.float()), SHAPE.head_dim)
    new_q, new_k = (heads(after, product, x, SHAPE) for product in ("q_proj", "k_proj"))
    plain_q, plain_k = hadamard(q, SHAPE.head_dim), hadamard(k, SHAPE.head_dim)
    new_q, new_k = hadamard(new_q, SHAPE.head_dim), kept(new_k, after)
    expected = differences(scores(q, k))
    torch.testing.assert_close(differences(scores(new_q, new_k)), expected, rtol=1e-5, atol=1e-4)  # fp32 weights
    before_error = (differences(scores(to_int8_and_back(plain_q), to_int8_and_back(plain_k))) - expected).square()
    error = (differences(scores(to_int8_and_back(new_q), to_int8_and_back(new_k))) - expected).square()
    assert error.mean() < 0.5 * before_error.mean()


def test_the_offset_is_the_mean_of_what_is_kept() -> None:
    keys, queries = normal(40, 2, 8, seed=5) + normal(2, 8, seed=6), normal(40, 4, 8, seed=7)
    identity = {"self_attn.k_proj.weight": torch.eye(16), "self_attn.q_proj.weight": torch.eye(32)}
    after = balanced_keys(SHAPE, identity, key_moments(keys.float(), queries.float()), SHAPE.head_dim)
    scaled = (keys.view(40, 16) @ after["self_attn.k_proj.weight"].double().T).view(40, 2, 8)
    mean = kept(scaled, after).mean(0)
    # each of 40 keys is rounded to a step: 2^-15 of the largest
    assert mean.abs().max() <= scaled.abs().max() * 2**-15 * SHAPE.head_dim**0.5
    spread = (keys - keys.mean(0)).square().mean((0, 2))
    # keys are rounded by half a step at most, 2^-16 of the largest; fp32 weights by far less
    rounding = float(keys.abs().max() * 2**-16 / spread.sqrt().min())
    rtol = 2 * rounding + rounding**2 + 1e-5
    torch.testing.assert_close(kept(scaled, after).square().mean((0, 2)), spread, rtol=rtol, atol=0)


def test_logits_stay(case: Case) -> None:
    changed = dict(case.weights)
    for layer in range(case.config.num_layers):
        prefix = f"model.layers.{layer}."
        before = {n.removeprefix(prefix): w for n, w in case.weights.items() if n.startswith(prefix)}
        after = balanced_keys(case.config, before, uneven_moments(case.config, layer), 1)
        assert after[KEY_OFFSET].any()
        differing = {name for name in before if not torch.equal(before[name], after[name])}
        assert differing == (set() if case.config.qk_norm else CHANGED & before.keys())
        changed |= {f"{prefix}{name}": weight for name, weight in after.items()}
    # Logits are below 5; weights and sums are rounded anew, in fp32.
    torch.testing.assert_close(logits(case.config, changed), logits(case.config, case.weights), rtol=0, atol=2e-5)


def logits(config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    transformer = Transformer(config, weights, select(CPU, "reference"), CPU, Numerics.REFERENCE)
    runner = ModelRunner(transformer, make_cache(config, KVFormat.FP32, [len(p) for p in PROMPTS], CPU))
    sequences = make_sequences(PROMPTS, 0, runner.cache)
    prefill(runner, sequences, 64, keep_all=True)
    return torch.stack([row for sequence in sequences for row in sequence.logits])


def test_tokens_that_are_not_finite_do_not_count() -> None:
    keys, queries = normal(9, 2, 8, seed=7).float(), normal(9, 4, 8, seed=8).float()
    bad_keys, bad_queries = torch.cat((keys, keys)), torch.cat((queries, queries))
    bad_keys[9:14, 1, 3], bad_queries[13:, 0, 0] = torch.nan, torch.inf
    expected, moments = key_moments(keys, queries), key_moments(bad_keys, bad_queries)
    assert expected is not None
    assert moments is not None
    assert torch.equal(moments.means, expected.means)
    assert torch.equal(moments.deviations, expected.deviations)
    assert torch.equal(moments.query_sizes, expected.query_sizes)
    assert key_moments(keys * torch.nan, queries) is None
    weights = uneven_weights(SHAPE)
    assert balanced_keys(SHAPE, weights, None, 8) == weights


@pytest.mark.parametrize("zeros", ["keys", "queries", "one pair of keys"])
def test_zeros_leave_finite_weights(zeros: str) -> None:
    keys, queries = normal(9, 2, 8, seed=7).float(), normal(9, 4, 8, seed=8).float()
    match zeros:
        case "keys":
            keys.zero_()
        case "queries":
            queries.zero_()
        case _:
            keys[:, 0, 1 :: SHAPE.head_dim // 2] = 0.0
    after = balanced_keys(SHAPE, uneven_weights(SHAPE), key_moments(keys, queries), 8)
    for weight in after.values():
        assert weight.isfinite().all()
        assert weight.abs().max() < 1e5
