"""Int8 weights in the order in which integer products read them: sixteen outputs side by side, four inputs of each in
one word. The same bytes serve AVX-512 VNNI, AMX (whose tile of 64 inputs is 1 KiB of them) and plain vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.quantized import ZERO_POINT

PANEL_OUTPUTS = 16
DEPTH_UNIT = 64
"""The depth is padded with zero weights to a multiple of this."""
_WORD = 4
_ALIGNMENT = 64  # a panel's rows lie in whole cache lines


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """weight [N, K] ~ int8 * scales; contiguous tensors on the CPU, in panels of 16 outputs, padded with zeros."""

    values: torch.Tensor  # [panels, padded depth / 4, 16, 4] int8: [p, k // 4, n, k % 4] is output 16 p + n, input k
    corrections: torch.Tensor  # [panels * 16] int32: -ZERO_POINT * the sum of an output's int8 weights
    scales: torch.Tensor  # [panels * 16] fp32
    num_outputs: int
    depth: int

    @property
    def num_panels(self) -> int:
        return self.values.shape[0]

    @property
    def padded_depth(self) -> int:
        """Rows that are multiplied must be readable up to here; what they hold beyond `depth` does not matter."""
        return _WORD * self.values.shape[1]


class PanelMemory:
    """One piece of memory for the panels of many weights, in the order in which they are packed.

    NumPy asks the system for huge pages where memory is this large, and not for single weights: a product of one row
    reads each weight once, and would walk page tables every 4 KiB.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        """`shapes`: [N, K] of each weight to come."""
        size = sum(PANEL_OUTPUTS * panels * depth for panels, depth in map(_padded_shape, shapes))
        memory = torch.from_numpy(np.empty(size + _ALIGNMENT, np.int8))
        begin = -memory.data_ptr() % _ALIGNMENT
        self._left = memory[begin : begin + size]

    def take(self, size: int) -> torch.Tensor:
        """[size] int8."""
        taken, self._left = self._left[:size], self._left[size:]
        assert len(taken) == size, "a weight that was not among the shapes"
        return taken


def pack_weight(values: torch.Tensor, scales: torch.Tensor, memory: PanelMemory | None = None) -> PackedWeight:
    """values [N, K] int8, scales [N] fp32."""
    num_outputs, depth = values.shape
    num_panels, padded_depth = _padded_shape(values.shape)
    if (num_panels * PANEL_OUTPUTS, padded_depth) != (num_outputs, depth):
        whole = values.new_zeros(num_panels * PANEL_OUTPUTS, padded_depth)
        whole[:num_outputs, :depth] = values
        values = whole
    # Whole words move, which is several times faster than single bytes.
    words = values.contiguous().view(torch.int32).view(num_panels, PANEL_OUTPUTS, padded_depth // _WORD)
    memory = memory or PanelMemory([(num_outputs, depth)])
    packed = memory.take(values.numel())
    packed.view(torch.int32).view(num_panels, padded_depth // _WORD, PANEL_OUTPUTS).copy_(words.transpose(1, 2))
    return PackedWeight(
        values=packed.view(num_panels, padded_depth // _WORD, PANEL_OUTPUTS, _WORD),
        corrections=values.sum(dim=1, dtype=torch.int32).mul_(-ZERO_POINT),
        scales=torch.cat([scales, scales.new_zeros(num_panels * PANEL_OUTPUTS - num_outputs)]),
        num_outputs=num_outputs,
        depth=depth,
    )


def _padded_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Panels, and their depth."""
    return -(-shape[0] // PANEL_OUTPUTS), -(-shape[1] // DEPTH_UNIT) * DEPTH_UNIT
