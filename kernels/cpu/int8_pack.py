"""Int8 weights in the order in which integer products read them: sixteen outputs side by side, four inputs of each in
one word. The same bytes serve AVX-512 VNNI, AMX (whose tile of 64 inputs is 1 KiB of them) and plain vectors."""

from dataclasses import dataclass

import torch

from kernels.quantized import ZERO_POINT

PANEL_OUTPUTS = 16
DEPTH_UNIT = 64
"""The depth is padded with zero weights to a multiple of this."""
_WORD = 4


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


def pack_weight(values: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """values [N, K] int8, scales [N] fp32."""
    num_outputs, depth = values.shape
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    padded_depth = -(-depth // DEPTH_UNIT) * DEPTH_UNIT
    if (num_panels * PANEL_OUTPUTS, padded_depth) != (num_outputs, depth):
        whole = values.new_zeros(num_panels * PANEL_OUTPUTS, padded_depth)
        whole[:num_outputs, :depth] = values
        values = whole
    # Whole words move, which is several times faster than single bytes.
    words = values.contiguous().view(torch.int32).view(num_panels, PANEL_OUTPUTS, padded_depth // _WORD)
    packed = words.transpose(1, 2).contiguous().view(torch.int8)
    return PackedWeight(
        values=packed.view(num_panels, padded_depth // _WORD, PANEL_OUTPUTS, _WORD),
        corrections=values.sum(dim=1, dtype=torch.int32).mul_(-ZERO_POINT),
        scales=torch.cat([scales, scales.new_zeros(num_panels * PANEL_OUTPUTS - num_outputs)]),
        num_outputs=num_outputs,
        depth=depth,
    )
