"""Activations quantized row by row for integer products, and what a backend offers to make them.

A row's values and scale depend on nothing but the row. Weights, products and rotation are not known here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kernels.contract import QUANT_MAX, Ops

ZERO_POINT = 128
"""Quantized activations are stored as unsigned bytes, value + ZERO_POINT: the form that CPUs multiply fastest."""
ROW_SCALE_FLOOR = 2.0**-100
"""The smallest scale of a row: an all-zero row gets it, and no scale is subnormal."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """x[t, k] = (values[t, k] - ZERO_POINT) * scales[t]; a row with a NaN or an Inf has a NaN as its scale."""

    values: torch.Tensor  # [T, K] uint8, 1 .. 255
    scales: torch.Tensor  # [T] fp32


@runtime_checkable
class RowQuantizer(Protocol):
    """Symmetric, one scale per row: scale = max(absmax / 127, ROW_SCALE_FLOOR), value = rint(x / scale), to even."""

    def quantize_rows(self, x: torch.Tensor) -> QuantizedRows:
        """x [T, K] fp32."""

    def rms_norm_quantize(self, x: torch.Tensor, eps: float, offset: torch.Tensor | None) -> QuantizedRows:
        """x [T, K] fp32, offset [K] fp32 -> x / sqrt(mean(x^2) + eps) - offset, quantized. The norm's weight is in the
        product that follows, and what the offset takes from it in that product's bias."""

    def silu_mul_quantize(self, gate_up: torch.Tensor, row_scales: torch.Tensor | None, block: int) -> QuantizedRows:
        """gate_up [T, 2F] fp32, times row_scales [T] where given -> hadamard(silu(first half) * second half, block),
        quantized. Precondition: as `hadamard`."""

    def add_scaled(self, x: torch.Tensor, product: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        """x + product * row_scales, each operation rounded; x, product [T, N] fp32, row_scales [T] fp32."""


@runtime_checkable
class IntegerProducts(Protocol):
    """What a backend offers whose integer products are faster than fp32 ones."""

    def make_integer_product(
        self, values: torch.Tensor, scales: torch.Tensor
    ) -> Callable[[QuantizedRows], torch.Tensor]:
        """values [N, K] int8 within ±127, scales [N] fp32 -> from rows [T, K] to [T, N] fp32: fp32(sum over k of
        (rows.values - ZERO_POINT) * values) * scales, not yet times rows.scales. The sums are exact."""


def row_quantizer(ops: Ops) -> RowQuantizer:
    """The backend's own, or plain torch where it has none."""
    return ops if isinstance(ops, RowQuantizer) else PlainRowQuantizer(ops)


class PlainRowQuantizer:
    """The specification, on any device."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def quantize_rows(self, x: torch.Tensor) -> QuantizedRows:
        largest = x.abs().amax(dim=-1)
        scales = (largest / QUANT_MAX).clamp_min(ROW_SCALE_FLOOR)
        is_bad = ~largest.isfinite()
        scales = torch.where(is_bad, torch.nan, scales)
        values = torch.where(is_bad[:, None], 0.0, torch.round(x / scales[:, None]))
        return QuantizedRows((values + ZERO_POINT).to(torch.uint8), scales)

    def rms_norm_quantize(self, x: torch.Tensor, eps: float, offset: torch.Tensor | None) -> QuantizedRows:
        normed = self._ops.rms_norm(x, torch.ones(x.shape[-1], device=x.device), eps)
        return self.quantize_rows(normed if offset is None else normed - offset)

    def silu_mul_quantize(self, gate_up: torch.Tensor, row_scales: torch.Tensor | None, block: int) -> QuantizedRows:
        scaled = gate_up if row_scales is None else gate_up * row_scales[:, None]
        return self.quantize_rows(hadamard(self._ops.silu_mul(scaled), block))

    def add_scaled(self, x: torch.Tensor, product: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        return x + product * row_scales[:, None]


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each run of `block` values of the last dimension times the orthonormal Hadamard matrix (symmetric, its own
    inverse). Precondition: `block` is a power of two and divides the last dimension; 1 changes nothing.

    Sums run over ever more distant neighbours, so every implementation rounds alike.
    """
    y = x
    distance = 1
    while distance < block:
        pairs = y.reshape(*x.shape[:-1], x.shape[-1] // (2 * distance), 2, distance)
        low, high = pairs.unbind(dim=-2)
        y = torch.stack((low + high, low - high), dim=-2)
        distance *= 2
    return y.reshape(x.shape) * block**-0.5
