"""Balancing computes the same function, of every family, and leaves no channel smaller than its neighbours."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from common.kv.layout import KVFormat
from common.model.calibration.balancing import BalancedLayer, balanced_layer
from common.model.calibration.layer_inputs import PRODUCTS
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.rotation import RotatedModel, rotate
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from tests.support.paged_generation import make_cache, make_sequences, prefill
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
PROMPTS = [[7], list(range(40, 57))]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, V and down not rotated": ("llama", {"head_dim": 24, "intermediate_size": 81}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}
CHANGED = {f"{product}.weight" for product in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")}
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def rotated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RotatedModel:
    family, overrides = request.param
    root = tmp_path_factory.mktemp("balancing")
    prepared = prepare_model(str(make_tiny_model(root / "tiny", family, **overrides)), root / "cache", lambda _: None)
    return rotate(prepared.config, load_weights(prepared, CPU))


def layer_weights(rotated: RotatedModel, layer: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): rotated.weights[name] for name in rotated.weights if name.startswith(prefix)}


def uneven_moments(weights: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """Of inputs some of which are ten times others."""
    generator = torch.Generator().manual_seed(seed)
    moments = {}
    for product in (product for products in PRODUCTS for product in products):
        width = weights[f"{product}.weight"].shape[1]
        x = torch.randn(2 * width, width, dtype=torch.float64, generator=generator)
        x *= 10 ** torch.rand(width, dtype=torch.float64, generator=generator)
        moments[product] = (50 * x.T @ x).round()
    return moments


def balanced(rotated: RotatedModel, layer: int) -> tuple[dict[str, torch.Tensor], Tensors, BalancedLayer]:
    weights = layer_weights(rotated, layer)
    moments = uneven_moments(weights, layer)
    return weights, moments, balanced_layer(rotated, weights, moments)


def logits(rotated: RotatedModel, weights: Tensors) -> torch.Tensor:
    ops, config = select(CPU, "reference"), rotated.config
    transformer = Transformer(config, weights, ops, CPU, Numerics.REFERENCE, down_block=rotated.down_block)
    runner = ModelRunner(transformer, make_cache(config, KVFormat.FP32, [len(p) for p in PROMPTS], CPU))
    sequences = make_sequences(PROMPTS, 0, runner.cache)
    prefill(runner, sequences, 64, keep_all=True)
    return torch.stack([row for sequence in sequences for row in sequence.logits])


def test_logits_stay(rotated: RotatedModel) -> None:
    changed = dict(rotated.weights)
    for layer in range(rotated.config.num_layers):
        weights, _, after = balanced(rotated, layer)
        differing = {name for name in weights if not torch.allclose(weights[name], after.weights[name], rtol=0.01)}
        assert differing >= CHANGED
        assert differing <= CHANGED | {"self_attn.v_proj.bias", "mlp.up_proj.bias"}
        changed |= {f"model.layers.{layer}.{name}": weight for name, weight in after.weights.items()}
    # Logits are below 5; weights and sums are rounded anew, in fp32.
    torch.testing.assert_close(logits(rotated, changed), logits(rotated, rotated.weights), rtol=0, atol=2e-5)


def test_moments_are_those_of_what_products_read_then(rotated: RotatedModel) -> None:
    """With them the products' outputs have the second moments that they had."""
    weights, moments, after = balanced(rotated, 0)
    assert after.moments.keys() == moments.keys()
    for product in ("self_attn.o_proj", "mlp.down_proj"):
        before_w, after_w = (w[f"{product}.weight"].double() for w in (weights, after.weights))
        outputs = before_w @ moments[product] @ before_w.T
        torch.testing.assert_close(after_w @ after.moments[product] @ after_w.T, outputs, rtol=1e-4, atol=1e-2)
    for product in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert torch.equal(after.moments[product], moments[product])


def test_what_is_balanced_stays(rotated: RotatedModel) -> None:
    _, _, once = balanced(rotated, 0)
    twice = balanced_layer(rotated, once.weights, once.moments)
    for name, weight in once.weights.items():
        torch.testing.assert_close(twice.weights[name], weight, rtol=1e-4, atol=1e-6)


def test_channels_of_zeros_get_a_finite_scale(rotated: RotatedModel) -> None:
    weights = layer_weights(rotated, 0)
    weights["mlp.down_proj.weight"] = torch.zeros_like(weights["mlp.down_proj.weight"])
    weights["self_attn.o_proj.weight"] = weights["self_attn.o_proj.weight"].clone()
    weights["self_attn.o_proj.weight"][:, : rotated.config.head_dim] = 0.0
    moments = {product: torch.zeros_like(of_it) for product, of_it in uneven_moments(weights, 0).items()}
    for seen in (moments, uneven_moments(weights, 0)):
        assert all(weight.isfinite().all() for weight in balanced_layer(rotated, weights, seen).weights.values())


def test_without_finite_values_nothing_changes(rotated: RotatedModel) -> None:
    weights = layer_weights(rotated, 0)
    assert balanced_layer(rotated, weights, {}).weights == weights
    moments = uneven_moments(weights, 0)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        weights[name] = torch.full_like(weights[name], torch.inf)
    assert balanced_layer(rotated, weights, moments).weights == weights
