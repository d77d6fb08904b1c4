"""Means of normed rows taken off them before they are quantized; what the products lose by it goes into their biases.

About half of what the residual stream is after its norm is the same for all tokens. Exact but for rounding: products
are linear, W x = W (x - m) + W m. What is left is quantized in finer steps, and the weights' own rounding errors meet
less of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from common.model.calibration.exact_sums import in_steps
from kernels.quantized import ZERO_POINT, QuantizedRows, RowQuantizer

_ROWS_AT_A_TIME = 4096  # in fp64


@dataclass(frozen=True, slots=True)
class CentredRows:
    offset: torch.Tensor  # [K] fp32
    rows: QuantizedRows  # less the offset


def centred(rows: QuantizedRows, quantizer: RowQuantizer) -> CentredRows | None:
    """None without finite rows."""
    values = (rows.values.float() - ZERO_POINT) * rows.scales[:, None]
    is_finite = rows.scales.isfinite()
    if not is_finite.any():
        return None
    steps, step = in_steps(values[is_finite])
    offset = (steps.sum(0) * (step / int(is_finite.sum()))).float()
    return CentredRows(offset, quantizer.quantize_rows(values - offset))


def biases_with(
    offset: torch.Tensor, weights: Mapping[str, torch.Tensor], products: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Biases by name of products that read what the offset is taken off; `weights` [N, K] and biases [N] fp32."""
    biases = {}
    for product in products:
        parts = [part.double() @ offset.double() for part in weights[f"{product}.weight"].split(_ROWS_AT_A_TIME)]
        bias = torch.cat(parts)
        if f"{product}.bias" in weights:
            bias += weights[f"{product}.bias"].double()
        biases[f"{product}.bias"] = bias.float()
    return biases
