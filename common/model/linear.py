"""Matrix products of the model: one small Protocol, one maker, and what each numeric path promises.

The numeric path is a property of the worker: it enters the model's fingerprint, so only equal paths exchange KV.
"""

from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F


class Numerics(StrEnum):
    """How weights and activations are represented in matrix products."""

    REFERENCE = "reference"  # fp32 weights and activations


class Linear(Protocol):
    """y = x W^T + b over rows. A path whose rows do not depend on one another says so in `exactness`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] fp32 -> [T, out_features] fp32."""


def exactness(numerics: Numerics) -> tuple[bool, str]:
    """Whether a row's result is bit-identical whatever rows it is computed with; if not, why (else empty)."""
    match numerics:
        case Numerics.REFERENCE:
            return False, "fp32 matrix products round differently for different numbers of rows"


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, numerics: Numerics) -> Linear:
    """weight [out_features, in_features] fp32, bias [out_features] fp32 or none; both on the device to compute on."""
    match numerics:
        case Numerics.REFERENCE:
            return _ReferenceLinear(weight, bias)


class _ReferenceLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)
