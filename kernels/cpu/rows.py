"""Compiled row operations: RMS norm, rotary positions, SwiGLU's product. Tensors are contiguous fp32.

Each takes parts of `part_rows` rows until none is left; threads may share `next_part`, which starts at 0. A row's
result depends on nothing but the row.
"""

from typing import Any

import numba
import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, entry_point, inlined
from kernels.cpu.elementary import exp_fp32, silu_mul_lanes
from kernels.cpu.simd import LANES

_I64, _F32 = numba.types.int64, numba.types.float32
_ROWS, _FLOATS, _COUNTER = _F32[:, ::1], _F32[::1], _I64[::1]
_VOID = numba.types.void

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@inlined
def next_rows(next_part: Any, part_rows: int, num_rows: int) -> Any:
    begin = simd.take_next(simd.ints64(next_part.ctypes.data)) * part_rows
    return begin, min(begin + part_rows, num_rows)


@compiled
def sum_squares(values: Any, size: int) -> np.float32:
    sums = simd.splat(_ZERO)
    for at in range(0, size - LANES + 1, LANES):
        lanes = simd.load(values, at)
        sums = simd.fma(lanes, lanes, sums)
    total = simd.sum_lanes(sums)
    for i in range(size // LANES * LANES, size):
        total = simd.fma(values[i], values[i], total)
    return total


@compiled
def silu_mul_row(source: Any, scale: np.float32, target: Any, width: int) -> None:
    """source [2 * width], times `scale` -> silu(first half) * second half."""
    whole = width // LANES * LANES
    scales = simd.splat(scale)
    for at in range(0, whole, LANES):
        gate = simd.multiply(simd.load(source, at), scales)
        up = simd.multiply(simd.load(source, width + at), scales)
        simd.store(target, at, silu_mul_lanes(gate, up))
    for i in range(whole, width):
        gate_value = source[i] * scale
        target[i] = gate_value / (_ONE + exp_fp32(-gate_value)) * (source[width + i] * scale)


@compiled
def rms_norm_row(values: Any, weight: Any, eps: np.float32, target: Any, width: int) -> None:
    """`target` may be `values`."""
    factor = _ONE / np.sqrt(sum_squares(values, width) / np.float32(width) + eps)
    for i in range(width):
        target[i] = values[i] * factor * weight[i]


@compiled
def rope_head(source: Any, cos: Any, sin: Any, target: Any, half: int) -> None:
    """One head of 2 * `half` dimensions; the pointers do not overlap."""
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        low, high = simd.load(source, i), simd.load(source, half + i)
        cosines, sines = simd.load(cos, i), simd.load(sin, i)
        simd.store(target, i, simd.subtract(simd.multiply(low, cosines), simd.multiply(high, sines)))
        simd.store(target, half + i, simd.add(simd.multiply(high, cosines), simd.multiply(low, sines)))
    for i in range(whole, half):
        target[i] = source[i] * cos[i] - source[half + i] * sin[i]
        target[half + i] = source[half + i] * cos[i] + source[i] * sin[i]


@entry_point(_VOID(_ROWS, _FLOATS, _F32, _ROWS, _I64, _COUNTER))
def rms_norm_rows(x: Any, weight: Any, eps: Any, out: Any, part_rows: int, next_part: Any) -> None:
    width = x.shape[1]
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            source, target = simd.floats(x[row].ctypes.data), simd.floats(out[row].ctypes.data)
            rms_norm_row(source, simd.floats(weight.ctypes.data), eps, target, width)
        begin, end = next_rows(next_part, part_rows, x.shape[0])


@entry_point(_VOID(_F32[:, :, ::1], _ROWS, _ROWS, _F32[:, :, ::1], _I64, _COUNTER))
def rope_rows(x: Any, cos: Any, sin: Any, out: Any, part_rows: int, next_part: Any) -> None:
    half = x.shape[2] // 2
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            cosines, sines = simd.floats(cos[row].ctypes.data), simd.floats(sin[row].ctypes.data)
            for head in range(x.shape[1]):
                source, target = simd.floats(x[row, head].ctypes.data), simd.floats(out[row, head].ctypes.data)
                rope_head(source, cosines, sines, target, half)
        begin, end = next_rows(next_part, part_rows, x.shape[0])


@entry_point(_VOID(_ROWS, _ROWS, _I64, _COUNTER))
def silu_mul_rows(gate_up: Any, out: Any, part_rows: int, next_part: Any) -> None:
    width = out.shape[1]
    begin, end = next_rows(next_part, part_rows, out.shape[0])
    while begin < end:
        for row in range(begin, end):
            source, target = simd.floats(gate_up[row].ctypes.data), simd.floats(out[row].ctypes.data)
            silu_mul_row(source, _ONE, target, width)
        begin, end = next_rows(next_part, part_rows, out.shape[0])
