"""A rotated model's weights as int8, rounded so that products err least on the calibration text."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from common.model.calibration.balancing import BalancedLayer, balanced_layer
from common.model.calibration.key_balancing import balanced_keys, key_moments
from common.model.calibration.layer_inputs import PRODUCTS, LayerRun, LayerRunner
from common.model.calibration.offsets import CentredRows, biases_with, centred
from common.model.int8_product import QuantizedWeight, quantize_weight
from common.model.linear import Numerics
from common.model.rotation import RotatedModel
from common.model.transformer import head_block
from common.model.weight_rounding import WeightRounder, second_moments
from kernels.contract import Ops
from kernels.quantized import QuantizedRows, row_quantizer

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
_NORM_OFFSET = "model.norm.offset"
_NORMS = {0: "input_layernorm", 2: "post_attention_layernorm"}
"""Before which of PRODUCTS a norm stands."""
NamedTensors = Iterator[tuple[str, torch.Tensor]]


def calibrated_weights(rotated: RotatedModel, ops: Ops, sequences: Sequence[Sequence[int]]) -> NamedTensors:
    """Names and tensors as `Transformer` takes them on the int8 path: matrices of products int8, with their scales.

    `sequences`: token ids of the calibration text. Only one layer's weights are in memory at a time.
    """
    runner = LayerRunner(rotated.config, rotated.down_block, ops, sequences)
    embedding = rotated.weights[_EMBEDDING]
    yield _EMBEDDING, embedding
    token_ids = torch.tensor([token_id for sequence in sequences for token_id in sequence])
    residual = F.embedding(token_ids, embedding)
    for layer in range(rotated.config.num_layers):
        prefix = f"model.layers.{layer}."
        weights = {
            name.removeprefix(prefix): rotated.weights[name] for name in rotated.weights if name.startswith(prefix)
        }
        run = runner.run(layer, dict(nearest_weights(weights)), residual)
        for name, tensor in _rounded_layer(layer_to_round(rotated, weights, run, ops)):
            yield f"{prefix}{name}", tensor
        residual, head_input = run.residual, run.head_input
    yield _NORM, rotated.weights[_NORM]
    yield from _rounded_head(rotated.weights[f"{_HEAD}.weight"], head_input, ops)


def layer_to_round(
    rotated: RotatedModel, weights: Mapping[str, torch.Tensor], run: LayerRun, ops: Ops
) -> BalancedLayer:
    """`weights` of one layer without their prefix, fp32; `run`: what became of them, rounded to nearest."""
    head_size = head_block(rotated.config, Numerics.INT8)
    with_keys = balanced_keys(rotated.config, weights, key_moments(run.keys, run.queries), head_size)
    inputs, offsets = list(run.inputs), {}
    for number in _NORMS:
        rows = _centred(run.inputs[number], weights, PRODUCTS[number], ops)
        if rows is not None:
            inputs[number], offsets[number] = rows.rows, rows.offset
    balanced = balanced_layer(rotated, with_keys, _layer_moments(inputs, ops))
    changed = dict(balanced.weights)
    for number, offset in offsets.items():
        changed |= biases_with(offset, balanced.weights, PRODUCTS[number])
        changed[f"{_NORMS[number]}.offset"] = offset
    return BalancedLayer(changed, balanced.moments)


def _rounded_head(weight: torch.Tensor, head_input: QuantizedRows, ops: Ops) -> NamedTensors:
    weights = {f"{_HEAD}.weight": weight}
    rows = _centred(head_input, weights, (_HEAD,), ops)
    if rows is not None:
        head_input = rows.rows
        yield from biases_with(rows.offset, weights, (_HEAD,)).items()
        yield _NORM_OFFSET, rows.offset
    yield from _rounded(weights, second_moments(head_input, ops))


def _centred(
    rows: QuantizedRows, weights: Mapping[str, torch.Tensor], products: Sequence[str], ops: Ops
) -> CentredRows | None:
    """None where a bias would not be finite, or a mean."""
    if all(weights[f"{product}.weight"].isfinite().all() for product in products):
        return centred(rows, row_quantizer(ops))
    return None


def _layer_moments(inputs: Sequence[QuantizedRows], ops: Ops) -> dict[str, torch.Tensor]:
    """Second moments by the product that reads; absent where the model computes no finite value."""
    of_inputs = [second_moments(rows, ops) for rows in inputs]
    return {
        product: moments
        for products, moments in zip(PRODUCTS, of_inputs, strict=True)
        for product in products
        if moments is not None
    }


def nearest_weights(weights: Mapping[str, torch.Tensor]) -> NamedTensors:
    """The same names, each weight rounded to the nearest integer."""
    for name, weight in weights.items():
        if weight.dim() == 2 and name != _EMBEDDING:
            yield from _named(name, quantize_weight(weight))
        else:
            yield name, weight


def _rounded_layer(layer: BalancedLayer) -> NamedTensors:
    yield from ((name, weight) for name, weight in layer.weights.items() if weight.dim() == 1)
    for products in PRODUCTS:
        matrices = {f"{product}.weight": layer.weights[f"{product}.weight"] for product in products}
        yield from _rounded(matrices, layer.moments.get(products[0]))


def _rounded(matrices: Mapping[str, torch.Tensor], moments: torch.Tensor | None) -> NamedTensors:
    """Matrices that read the same input."""
    if moments is None:  # the model computes no finite value here: no rounding is better than another
        yield from nearest_weights(matrices)
        return
    rounder = WeightRounder(moments)
    for name, weight in matrices.items():
        yield from _named(name, rounder.quantize(weight))


def _named(name: str, quantized: QuantizedWeight) -> NamedTensors:
    yield name, quantized.values
    yield f"{name}_scales", quantized.scales
