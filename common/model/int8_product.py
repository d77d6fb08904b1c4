"""Products of quantized rows with int8 weights, summed exactly: a row's result does not depend on its neighbours.

Two ways to the same bits, chosen once per process by trying: oneDNN, where its sums do not saturate, and fp32 products
of integers. Both are exact only while every sum stays an integer that fp32 can hold, so weights that could go beyond
are cut into chunks of columns.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.contract import QUANT_MAX
from kernels.quantized import ZERO_POINT, QuantizedRows

_WEIGHT_SCALE_FLOOR = 2.0**-100
_MAX_EXACT = 2**24
"""fp32 holds every integer up to here. Some of oneDNN's kernels, chosen by the number of rows, turn the sum of the
unsigned products into fp32 before they take the zero point's share off."""
_MAX_VALUE = ZERO_POINT + QUANT_MAX


class QuantizedWeight(NamedTuple):
    """weight [N, K] ~ values * scales[:, None]."""

    values: torch.Tensor  # [N, K] int8 within ±127
    scales: torch.Tensor  # [N] fp32


ChunkProduct = Callable[[torch.Tensor], torch.Tensor]
"""values [T, K] uint8 -> [T, N] fp32, the exact sums of products times the scales it was made with."""
ChunkMaker = Callable[[torch.Tensor, torch.Tensor], ChunkProduct]
"""From weights [N, K] int8 and scales [N] fp32."""


class Int8Product:
    """rows [T, K] -> [T, N] fp32: fp32(sum over k of int8 products) * the weight's scale, not yet times rows.scales."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, make_chunk: ChunkMaker) -> None:
        chunks = exact_chunks(values)
        self._widths = [chunk.shape[1] for chunk in chunks]
        self._scales = scales
        of_chunks = scales if len(chunks) == 1 else torch.ones_like(scales)
        self._products = [make_chunk(chunk, of_chunks) for chunk in chunks]

    def __call__(self, rows: QuantizedRows) -> torch.Tensor:
        if len(self._products) == 1:
            return self._products[0](rows.values)
        total = torch.zeros((rows.values.shape[0], len(self._scales)), dtype=torch.int32, device=rows.values.device)
        for product, values in zip(self._products, rows.values.split(self._widths, dim=1), strict=True):
            total += product(values.contiguous()).to(torch.int32)
        return total.float() * self._scales


def make_int8_product(weight: QuantizedWeight) -> Int8Product:
    is_onednn = weight.values.device.type == "cpu" and onednn_is_exact()
    return Int8Product(*weight, onednn_chunk if is_onednn else fp32_chunk)


def product_description(device: torch.device) -> str:
    """Names the way chosen, for logs."""
    if device.type == "cpu" and onednn_is_exact():
        return "oneDNN u8·s8"
    return "fp32 products of integers: no exact int8 product on this device"


def exact_chunks(values: torch.Tensor) -> list[torch.Tensor]:
    """Columns of values [N, K], in as few equal chunks as keep every sum of u8·s8 products within fp32's integers."""
    num_chunks = 1
    while True:
        chunks = list(values.tensor_split(num_chunks, dim=1))
        if all(_largest_sum(chunk) <= _MAX_EXACT for chunk in chunks):
            return chunks
        num_chunks += 1


def _largest_sum(values: torch.Tensor) -> int:
    """The largest magnitude that a sum of some products of a channel with activations can have."""
    # int32 holds the sum of 16 million values, and torch sums into it more than twice as fast as into int64.
    positive = values.clamp_min(0).sum(dim=1, dtype=torch.int32)
    negative = values.sum(dim=1, dtype=torch.int32) - positive
    return _MAX_VALUE * int(torch.maximum(positive, -negative).max())


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """weight [N, K] fp32: one scale for each output channel, rounded to nearest even."""
    scales = (weight.abs().amax(dim=1) / QUANT_MAX).clamp_min(_WEIGHT_SCALE_FLOOR)
    values = (weight / scales[:, None]).round_()
    if not scales.isfinite().all():
        # A NaN or an Inf makes its channel's scale so, and with it every result of the channel; no integer can hold it.
        values = values.nan_to_num(0.0)
    return QuantizedWeight(values.to(torch.int8), scales)


@cache
def onednn_is_exact() -> bool:
    """Whether this process's oneDNN sums the largest products without loss.

    Without VNNI it adds pairs in 16 bits, which saturate. Feature names would not tell: a setting of oneDNN's can lower
    what it uses.
    """
    values = torch.full((16, 64), QUANT_MAX, dtype=torch.int8)
    for num_rows in (1, 16):
        rows = torch.full((num_rows, 64), _MAX_VALUE, dtype=torch.uint8)
        try:
            product = onednn_chunk(values, torch.ones(16))(rows)
        except (AttributeError, RuntimeError):  # torch built without oneDNN, or an oneDNN without this product
            return False
        if not product.eq(64 * QUANT_MAX * QUANT_MAX).all():
            return False
    return True


def onednn_chunk(values: torch.Tensor, scales: torch.Tensor) -> ChunkProduct:
    packed = torch.ops.onednn.qlinear_prepack(values.contiguous(), None)
    zero_points = torch.zeros(values.shape[0], dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise.default
    # Activations of scale 1; no bias; fp32 out with scale 1 and zero point 0; nothing fused.
    return lambda rows: multiply(
        rows, 1.0, ZERO_POINT, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )


def fp32_chunk(values: torch.Tensor, scales: torch.Tensor) -> ChunkProduct:
    """As fast and as big as the fp32 product."""
    integers = values.float()
    return lambda rows: F.linear(rows.float() - ZERO_POINT, integers) * scales
