"""Matrix products of the model with what belongs before them, and what each numeric path promises.

The numeric path is a property of the worker: it enters the model's fingerprint, so only equal paths exchange KV.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F

from common.model.int8_product import IntegerProduct, QuantizedWeight, integer_product, quantize_weight
from kernels.contract import Ops
from kernels.quantized import QuantizedRows, hadamard, row_quantizer

Weight: TypeAlias = torch.Tensor | QuantizedWeight
_EXACT_BACKENDS = ("cpu",)


class Numerics(StrEnum):
    """How weights and activations are represented in matrix products."""

    REFERENCE = "reference"  # fp32 weights and activations
    INT8 = "int8"  # int8 weights per output channel, int8 activations per row, exact int32 sums


@dataclass(frozen=True, slots=True)
class LinearWeights:
    weight: Weight  # [out_features, in_features] fp32; or, for the int8 path, quantized with the norm before it inside
    bias: torch.Tensor | None  # [out_features] fp32


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor  # [hidden]
    eps: float
    offset: torch.Tensor | None = None  # [hidden]: of the int8 path, taken off what is quantized


class Linear(Protocol):
    """y = x W^T + b over rows, and what precedes it. Rows depend on one another only where `exactness` says so."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] fp32 -> [T, out_features] fp32."""


class LinearMaker(Protocol):
    """Makes the layers of one numeric path. Weights are on the device to compute on; they may be dropped afterwards."""

    def linear(self, weights: LinearWeights) -> Linear: ...

    def norm_linear(self, norm: Norm, weights: LinearWeights) -> Linear:
        """RMS norm, then the product."""

    def mlp(self, norm: Norm, gate_up: LinearWeights, down: LinearWeights, hadamard_block: int) -> Linear:
        """x + down(hadamard(silu(gate) * up, hadamard_block)) where gate and up are products of the normed x.

        gate_up [2F, hidden], gate first; down [hidden, F]. `hadamard_block` 1: no Hadamard transform.
        """


def exactness(numerics: Numerics, backend: str) -> tuple[bool, str]:
    """Whether a row's result is bit-identical whatever rows it is computed with; if not, why (else empty).

    `backend` is the name of the operations between the products (`kernels.contract.Ops.name`).
    """
    if numerics is Numerics.REFERENCE:
        return False, "fp32 matrix products round differently for different numbers of rows"
    if backend not in _EXACT_BACKENDS:
        return False, f"operations of the {backend} backend round differently for different numbers of rows"
    return True, ""


def auto_numerics(backend: str) -> Numerics:
    """int8 where it is exact; it is the faster one there, too."""
    return Numerics.INT8 if exactness(Numerics.INT8, backend)[0] else Numerics.REFERENCE


def linear_maker(numerics: Numerics, ops: Ops) -> LinearMaker:
    match numerics:
        case Numerics.REFERENCE:
            return _ReferenceMaker(ops)
        case Numerics.INT8:
            return _Int8Maker(ops)


class _ReferenceMaker:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, weights: LinearWeights) -> Linear:
        return lambda x: F.linear(x, weights.weight, weights.bias)

    def norm_linear(self, norm: Norm, weights: LinearWeights) -> Linear:
        rms_norm = self._ops.rms_norm
        return lambda x: F.linear(rms_norm(x, norm.weight, norm.eps), weights.weight, weights.bias)

    def mlp(self, norm: Norm, gate_up: LinearWeights, down: LinearWeights, hadamard_block: int) -> Linear:
        gated, ops = self.norm_linear(norm, gate_up), self._ops

        def run(x: torch.Tensor) -> torch.Tensor:
            mixed = hadamard(ops.silu_mul(gated(x)), hadamard_block)
            return x + F.linear(mixed, down.weight, down.bias)

        return run


class _Int8Maker:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._quantizer = row_quantizer(ops)

    def linear(self, weights: LinearWeights) -> Linear:
        product, bias, quantizer = _int8_product(self._ops, weights), weights.bias, self._quantizer
        return lambda x: _scaled(product, quantizer.quantize_rows(x), bias)

    def norm_linear(self, norm: Norm, weights: LinearWeights) -> Linear:
        product, bias, quantizer = _int8_product(self._ops, weights, norm), weights.bias, self._quantizer
        return lambda x: _scaled(product, quantizer.rms_norm_quantize(x, norm.eps, norm.offset), bias)

    def mlp(self, norm: Norm, gate_up: LinearWeights, down: LinearWeights, hadamard_block: int) -> Linear:
        return _Int8Mlp(self._ops, norm, gate_up, down, hadamard_block)


class _Int8Mlp:
    """Without biases the scales of gate_up's rows are applied where gate and up are read, in no pass of their own."""

    def __init__(self, ops: Ops, norm: Norm, gate_up: LinearWeights, down: LinearWeights, hadamard_block: int) -> None:
        self._quantizer = row_quantizer(ops)
        self._norm = norm
        self._gate_up, self._gate_up_bias = _int8_product(ops, gate_up, norm), gate_up.bias
        self._down, self._down_bias = _int8_product(ops, down), down.bias
        self._hadamard_block = hadamard_block

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._quantizer.rms_norm_quantize(x, self._norm.eps, self._norm.offset)
        if self._gate_up_bias is None:
            gated = self._quantizer.silu_mul_quantize(self._gate_up(rows), rows.scales, self._hadamard_block)
        else:
            gate_up = _scaled(self._gate_up, rows, self._gate_up_bias)
            gated = self._quantizer.silu_mul_quantize(gate_up, None, self._hadamard_block)
        if self._down_bias is None:
            return self._quantizer.add_scaled(x, self._down(gated), gated.scales)
        return x + _scaled(self._down, gated, self._down_bias)


def _int8_product(ops: Ops, weights: LinearWeights, norm: Norm | None = None) -> IntegerProduct:
    weight = weights.weight
    if not isinstance(weight, QuantizedWeight):
        weight = quantize_weight(weight if norm is None else weight * norm.weight)
    return integer_product(ops, weight)


def _scaled(product: IntegerProduct, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
    # Two roundings, never a fused one: a vector's body and its tail must round alike.
    y = product(rows).mul_(rows.scales[:, None])
    return y if bias is None else y.add_(bias)
