"""Compiled quantization of rows, alone and fused with what comes before it; see `kernels.quantized.RowQuantizer`.

Tensors are contiguous. See `rows` for `part_rows` and `next_part`; a row's result depends on nothing but the row.
"""

from typing import Any

import numba
import numpy as np

from kernels.contract import QUANT_MAX
from kernels.cpu import simd
from kernels.cpu.compiling import compiled, entry_point
from kernels.cpu.elementary import INFINITY_BITS, largest_magnitude_bits, quotient_lanes
from kernels.cpu.hadamard import hadamard_in_place
from kernels.cpu.rows import next_rows, silu_mul_row, sum_squares
from kernels.cpu.simd import LANES
from kernels.quantized import ROW_SCALE_FLOOR, ZERO_POINT

_I64, _F32 = numba.types.int64, numba.types.float32
_ROWS, _FLOATS, _BYTES, _COUNTER = _F32[:, ::1], _F32[::1], numba.types.uint8[:, ::1], _I64[::1]
_VOID = numba.types.void

_ONE = np.float32(1.0)
_QUANT_MAX = np.float32(QUANT_MAX)
_SCALE_FLOOR = np.float32(ROW_SCALE_FLOOR)
_ZERO_POINT = np.int32(ZERO_POINT)
_NAN = np.float32(np.nan)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer, ties to even, in the low bits
_ROUNDER_BITS = np.int32(_ROUNDER.view(np.int32))


@compiled
def quantize_row(values: Any, size: int, target: Any) -> np.float32:
    """Returns the scale, NaN for a row with a NaN or an Inf."""
    largest = largest_magnitude_bits(values, 0, size)
    if largest >= INFINITY_BITS:
        for i in range(size):
            target[i] = np.uint8(_ZERO_POINT)
        return _NAN
    scale = max(np.int32(largest).view(np.float32) / _QUANT_MAX, _SCALE_FLOOR)
    divisor, reciprocal, rounder = simd.splat(scale), simd.splat(_ONE / scale), simd.splat(_ROUNDER)
    whole = size // LANES * LANES
    for at in range(0, whole, LANES):
        shifted = simd.add(quotient_lanes(simd.load(values, at), divisor, reciprocal), rounder)
        simd.store_low_bytes(target, at, shifted, ZERO_POINT)
    for i in range(whole, size):
        rounded = np.float32(values[i] / scale + _ROUNDER).view(np.int32) - _ROUNDER_BITS
        target[i] = np.uint8(rounded + _ZERO_POINT)
    return scale


@entry_point(_VOID(_ROWS, _BYTES, _FLOATS, _I64, _COUNTER))
def quantize_rows(x: Any, values: Any, scales: Any, part_rows: int, next_part: Any) -> None:
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            source = simd.floats(x[row].ctypes.data)
            scales[row] = quantize_row(source, x.shape[1], simd.bytes_unsigned(values[row].ctypes.data))
        begin, end = next_rows(next_part, part_rows, x.shape[0])


@entry_point(_VOID(_ROWS, _F32, _BYTES, _FLOATS, _I64, _COUNTER))
def rms_norm_quantize_rows(x: Any, eps: Any, values: Any, scales: Any, part_rows: int, next_part: Any) -> None:
    """The norm is one factor for a row: it multiplies the scale, and the quantized values are those of x itself."""
    width = x.shape[1]
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            source = simd.floats(x[row].ctypes.data)
            factor = _ONE / np.sqrt(sum_squares(source, width) / np.float32(width) + eps)
            scales[row] = quantize_row(source, width, simd.bytes_unsigned(values[row].ctypes.data)) * factor
        begin, end = next_rows(next_part, part_rows, x.shape[0])


@entry_point(_VOID(_ROWS, _FLOATS, _I64, _BYTES, _FLOATS, _I64, _COUNTER))
def silu_mul_quantize_rows(
    gate_up: Any, row_scales: Any, block: int, values: Any, scales: Any, part_rows: int, next_part: Any
) -> None:
    """row_scales [T], or [0] for none."""
    width = values.shape[1]
    factor = np.float32(1.0 / np.sqrt(np.float64(block)))
    scratch = np.empty(width, np.float32)
    mixed = simd.floats(scratch.ctypes.data)
    begin, end = next_rows(next_part, part_rows, gate_up.shape[0])
    while begin < end:
        for row in range(begin, end):
            scale = row_scales[row] if row_scales.shape[0] else _ONE
            silu_mul_row(simd.floats(gate_up[row].ctypes.data), scale, mixed, width)
            hadamard_in_place(mixed, width, block)
            scales[row] = quantize_row(mixed, width, simd.bytes_unsigned(values[row].ctypes.data)) * factor
        begin, end = next_rows(next_part, part_rows, gate_up.shape[0])
    simd.keep_alive(scratch)


@entry_point(_VOID(_ROWS, _ROWS, _FLOATS, _ROWS, _I64, _COUNTER))
def add_scaled_rows(x: Any, product: Any, row_scales: Any, out: Any, part_rows: int, next_part: Any) -> None:
    width = x.shape[1]
    whole = width // LANES * LANES
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            residual, added = simd.floats(x[row].ctypes.data), simd.floats(product[row].ctypes.data)
            target = simd.floats(out[row].ctypes.data)
            scale = simd.splat(row_scales[row])
            for at in range(0, whole, LANES):
                simd.store(target, at, simd.add(simd.load(residual, at), simd.multiply(simd.load(added, at), scale)))
            for i in range(whole, width):
                target[i] = residual[i] + added[i] * row_scales[row]
        begin, end = next_rows(next_part, part_rows, x.shape[0])
