"""The operations' contract, which every backend keeps."""

from typing import Protocol

import torch

from kernels.batch import AttentionBatch, KVLayerView

INT8_ATTENTION = "bytes4"
"""Names the arithmetic of the CPU backend's attention over INT8 KV: the values of K and V depend on it."""
QUANT_MAX = 127
SCALE_FLOOR = 2.0**-14
"""The smallest scale (fp16's smallest normal): an all-zero vector gets it."""


class Ops(Protocol):
    """Floating-point tensors are fp32 on CPU. No row's result depends on the other rows of its call, in the CPU and
    Triton attention, norm, rope and KV write; the reference promises it within rounding only."""

    name: str  # "reference", "cpu", "triton"
    description: str  # names the CPU features or the GPU in use

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D], weight [D] -> x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, H, D], cos and sin [T, D / 2] fp32 -> rotated [T, H, D]; halves are paired (x[i], x[i + D/2])."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2F] -> silu(first half) * second half, [T, F]."""

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
    ) -> None:
        """Writes k, v [T, H, D] fp32 into the slots of `layer` (mutated).

        Quantized layers: symmetric, one scale per token and head.
        scale = fp16(max(absmax / 127, SCALE_FLOOR)) rounded to nearest even;
        q = clamp(rint(x / fp32(scale)), -127, 127), all in fp32 with true division, rint to nearest even.
        `nonfinite` [T] int32 (mutated) grows by one for each head of K or of V with a NaN, an Inf or a scale beyond
        fp16; such a vector is written as zeros with SCALE_FLOOR (unquantized layers: as zeros).
        """

    def paged_attention(
        self, q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
    ) -> torch.Tensor:
        """q [T, Hq, D] fp32 -> [T, Hq, D] fp32: causal softmax attention over the paged context.

        Query head h reads KV head h // (Hq / H). `window` 0: the whole context; else the last `window` positions,
        the query's own included. Reads what write_kv wrote, so K and V of the new tokens are read back quantized.
        """
