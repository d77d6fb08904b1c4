"""Rounding of weights to integers so that products err least on given inputs, not each weight by itself.

One input column after the other is rounded, and each makes up for the errors of those before it as far as their
activations go together (LDLQ of QuIP, arXiv 2307.13304; the same result as GPTQ, arXiv 2210.17323).

Sums over activations are exact integers and all else is fp64, so another number of threads or another kind of CPU
hardly ever moves a weight by one step.
"""

import torch

from common.model.int8_product import QuantizedWeight, integer_product, weight_scales
from kernels.contract import QUANT_MAX, Ops
from kernels.quantized import ZERO_POINT, QuantizedRows

ROUNDING = "gptq6"
"""Names everything here and in `calibration` that an integer depends on, the text apart. Whoever changes it gives it
another name."""
_DAMPING = 0.01
"""Share of the mean square of an input that is added to each: rounding must not rely on few tokens' coincidences."""
_LARGEST_SCALE_QUANTILE = 0.9
"""Rows of a larger scale than this share of all rows have are counted with this one: no token outweighs the others."""
_EXACT_ROWS = 1024
"""Sums of products of so many rows are integers that fp32 can hold: at most 2^24 / 127^2."""
_BLOCK = 128
"""Columns whose errors reach those beyond together, in one product ..."""
_PART = 16
"""... and these the rest of their block."""
_SLAB = 2048
"""Output channels rounded at a time; they do not depend on one another."""


def second_moments(rows: QuantizedRows, ops: Ops) -> torch.Tensor | None:
    """Sums over rows of products of two inputs, up to a common factor: [K, K] fp64 integers. None without finite rows.

    Rows are brought to one scale and rounded to int8 again.
    """
    is_finite = rows.scales.isfinite()
    scales = rows.scales[is_finite]
    if scales.numel() == 0:
        return None
    largest = scales.sort().values[int(_LARGEST_SCALE_QUANTILE * (scales.numel() - 1))]
    values = rows.values[is_finite].float().sub_(ZERO_POINT)
    values = values.mul_((scales / largest).clamp_max_(1.0)[:, None]).round_().T.contiguous()
    moments = torch.zeros((values.shape[0], values.shape[0]), dtype=torch.float64)
    ones = torch.ones(values.shape[0])
    for part in values.split(_EXACT_ROWS, dim=1):
        product = integer_product(ops, QuantizedWeight(part.to(torch.int8), ones))
        moments += product(QuantizedRows((part + ZERO_POINT).to(torch.uint8), ones))
    return moments


class WeightRounder:
    """Rounds weights that read inputs with these second moments ([K, K] fp64)."""

    def __init__(self, moments: torch.Tensor) -> None:
        self._feedback = _feedback(moments)

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """weight [N, K] fp32: scales as `quantize_weight` chooses them, other integers."""
        scales = weight_scales(weight)
        slabs = [
            self._rounded(part.T.contiguous().double().div_(of_part).nan_to_num_(0.0, 0.0, 0.0)).T
            for part, of_part in zip(weight.split(_SLAB), scales.split(_SLAB), strict=True)
        ]
        return QuantizedWeight(torch.cat(slabs), scales)

    def _rounded(self, columns: torch.Tensor) -> torch.Tensor:
        """columns [K, N] fp64 in steps of their scales, mutated -> int8."""
        errors = torch.empty_like(columns)
        for start in range(0, columns.shape[0], _BLOCK):
            end = min(start + _BLOCK, columns.shape[0])
            wanted = columns[start:end] + self._feedback[:start, start:end].T @ errors[:start]
            for first in range(start, end, _PART):
                self._round_part(columns, errors, wanted[first - start : first - start + _PART], start, first)
        return columns.sub_(errors).round_().to(torch.int8)

    def _round_part(
        self, columns: torch.Tensor, errors: torch.Tensor, wanted: torch.Tensor, block_start: int, start: int
    ) -> None:
        """Sets errors[start : start + len(wanted)]; wanted, mutated: these columns with the errors before the block."""
        end = start + wanted.shape[0]
        wanted.addmm_(self._feedback[block_start:start, start:end].T, errors[block_start:start])
        for index in range(start, end):
            rounded = wanted[index - start].round().clamp_(-QUANT_MAX, QUANT_MAX)
            torch.sub(columns[index], rounded, out=errors[index])
            wanted[index - start + 1 :].addr_(self._feedback[index, index + 1 : end], errors[index])


def _feedback(moments: torch.Tensor) -> torch.Tensor:
    """[K, K] fp64, strictly upper: by how much of the error in input i input j has to be changed.

    With moments = U D U^T, U upper with a unit diagonal, the squared error of e is that of e U, weighted by D.
    """
    damped = moments.clone()
    # At least 1: moments are integers, and an input that is always zero leaves nothing to divide by.
    damped.diagonal().add_((_DAMPING * moments.diagonal().mean()).clamp_min(1.0))
    # Cholesky's factor is lower: in the reverse order of inputs it is the upper one.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return (upper / upper.diagonal()).triu(1).contiguous()
