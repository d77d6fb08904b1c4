"""Products of quantized rows with int8 weights in plain torch, on any device: exact, and as slow as fp32.

The specification of compiled products. fp32 sums of integers are exact only while every sum stays an integer that fp32
can hold, so weights that could go beyond are cut into chunks of columns.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from kernels.contract import QUANT_MAX, Ops
from kernels.quantized import ZERO_POINT, IntegerProducts, QuantizedRows

_WEIGHT_SCALE_FLOOR = 2.0**-100
_MAX_EXACT = 2**24
"""fp32 holds every integer up to here."""


class QuantizedWeight(NamedTuple):
    """weight [N, K] ~ values * scales[:, None]."""

    values: torch.Tensor  # [N, K] int8 within ±127
    scales: torch.Tensor  # [N] fp32


IntegerProduct: TypeAlias = Callable[[QuantizedRows], torch.Tensor]
"""As `Int8Product`, whatever computes it: the same bits."""


def integer_product(ops: Ops, weight: QuantizedWeight) -> IntegerProduct:
    """The backend's own, or plain torch where it has none."""
    if isinstance(ops, IntegerProducts):
        return ops.make_integer_product(weight.values, weight.scales)
    return Int8Product(weight)


class Int8Product:
    """rows [T, K] -> [T, N] fp32: fp32(sum over k of int8 products) * the weight's scale, not yet times rows.scales."""

    def __init__(self, weight: QuantizedWeight) -> None:
        chunks = exact_chunks(weight.values)
        self._widths = [chunk.shape[1] for chunk in chunks]
        self._scales = weight.scales
        self._chunks = [chunk.float() for chunk in chunks]

    def __call__(self, rows: QuantizedRows) -> torch.Tensor:
        integers = rows.values.float() - ZERO_POINT
        if len(self._chunks) == 1:
            return F.linear(integers, self._chunks[0]) * self._scales
        total = torch.zeros((integers.shape[0], len(self._scales)), dtype=torch.int32, device=integers.device)
        for chunk, values in zip(self._chunks, integers.split(self._widths, dim=1), strict=True):
            total += F.linear(values, chunk).to(torch.int32)
        return total.float() * self._scales


def exact_chunks(values: torch.Tensor) -> list[torch.Tensor]:
    """Columns of values [N, K], in as few equal chunks as keep every sum of products within fp32's integers."""
    num_chunks = 1
    while True:
        chunks = list(values.tensor_split(num_chunks, dim=1))
        if all(_largest_sum(chunk) <= _MAX_EXACT for chunk in chunks):
            return chunks
        num_chunks += 1


def _largest_sum(values: torch.Tensor) -> int:
    """The largest magnitude that a sum of some products of a channel with activations can have."""
    return QUANT_MAX * int(values.abs().sum(dim=1, dtype=torch.int32).max())


def weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] fp32 -> [N]: a channel's largest weight becomes QUANT_MAX steps."""
    return (weight.abs().amax(dim=1) / QUANT_MAX).clamp_min(_WEIGHT_SCALE_FLOOR)


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """weight [N, K] fp32: one scale for each output channel, rounded to nearest even."""
    scales = weight_scales(weight)
    values = (weight / scales[:, None]).round_()
    if not scales.isfinite().all():
        # A NaN or an Inf makes its channel's scale so, and with it every result of the channel; no integer can hold it.
        values = values.nan_to_num(0.0)
    return QuantizedWeight(values.to(torch.int8), scales)
