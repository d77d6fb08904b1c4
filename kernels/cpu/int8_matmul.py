"""STUB until the real one is merged."""
from typing import Any
import numpy as np
from kernels.cpu import simd
from kernels.cpu.compiling import compiled
PANEL = 16

@compiled
def multiply_panels(x: int, x_stride: int, row_scales: int, num_rows: int, values: int, depth: int, corrections: int, scales: int, bias: int,
                    num_outputs: int, first: int, end: int, y: int, y_stride: int, adds: int) -> None:
    for p in range(first, end):
        panel = simd.bytes_signed(values + p * depth * 16)
        for row in range(num_rows):
            source = simd.bytes_unsigned(x + row * x_stride)
            out = simd.floats(y)
            for n in range(16):
                c = p * 16 + n
                if c < num_outputs:
                    acc = simd.ints32(corrections)[c]
                    for k in range(depth // 4):
                        for j in range(4):
                            acc += np.int32(source[4 * k + j]) * np.int32(panel[(k * 16 + n) * 4 + j])
                    value = np.float32(acc) * simd.floats(scales)[c] * simd.floats(row_scales)[row]
                    if bias != 0:
                        value = value + simd.floats(bias)[c]
                    if adds:
                        value = out[row * y_stride + c] + value
                    out[row * y_stride + c] = value

import torch
from dataclasses import dataclass
PANEL_ = 16
@dataclass(frozen=True)
class PackedWeight:
    values: torch.Tensor
    corrections: torch.Tensor
    scales: torch.Tensor
    num_outputs: int
    depth: int
    padded_depth: int

def pack_weight(values, scales):
    n, k = values.shape
    np_, kp = -(-n // 16) * 16, -(-k // 64) * 64
    w = torch.zeros((np_, kp), dtype=torch.int8); w[:n, :k] = values
    packed = w.view(np_ // 16, 16, kp // 4, 4).permute(0, 2, 1, 3).contiguous()
    s = torch.zeros(np_); s[:n] = scales
    return PackedWeight(packed, (-128 * w.sum(1, dtype=torch.int32)).to(torch.int32), s, n, k, kp)
