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
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NAN = np.float32(np.nan)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer, ties to even, in the low bits
_ROUNDER_BITS = np.int32(_ROUNDER.view(np.int32))


@compiled
def _scale_of(largest: np.int32) -> np.float32:
    """From the bits of a row's largest magnitude, which is finite."""
    return max(np.int32(largest).view(np.float32) / _QUANT_MAX, _SCALE_FLOOR)


@compiled
def _spoiled(target: Any, size: int) -> np.float32:
    """A row with a NaN or an Inf becomes zeros; returns its scale."""
    for i in range(size):
        target[i] = np.uint8(_ZERO_POINT)
    return _NAN


@compiled
def quantize_row(values: Any, size: int, target: Any) -> np.float32:
    """Returns the scale, NaN for a row with a NaN or an Inf."""
    largest = largest_magnitude_bits(values, 0, size)
    if largest >= INFINITY_BITS:
        return _spoiled(target, size)
    scale = _scale_of(largest)
    divisor, reciprocal, rounder = simd.splat(scale), simd.splat(_ONE / scale), simd.splat(_ROUNDER)
    whole = size // LANES * LANES
    for at in range(0, whole, LANES):
        shifted = simd.add(quotient_lanes(simd.load(values, at), divisor, reciprocal), rounder)
        simd.store_low_bytes(target, at, shifted, ZERO_POINT)
    for i in range(whole, size):
        rounded = np.float32(values[i] / scale + _ROUNDER).view(np.int32) - _ROUNDER_BITS
        target[i] = np.uint8(rounded + _ZERO_POINT)
    return scale


@compiled
def _shifted(values: Any, offset: Any, size: np.float32, i: int) -> np.float32:
    return np.float32(values[i] - np.float32(offset[i] * size))


@compiled
def norm_quantize_row(values: Any, offset: int, eps: np.float32, size: int, target: Any) -> np.float32:
    """See `RowQuantizer.rms_norm_quantize`; the address of an offset [size] fp32, or 0. Returns the scale.

    The norm is one factor for a row, which the scale takes; so the offset is multiplied by what a row is divided by.
    """
    divided_by = np.sqrt(sum_squares(values, size) / np.float32(size) + eps)
    if offset == 0:
        return quantize_row(values, size, target) * (_ONE / divided_by)
    shift, largest, whole = simd.floats(offset), np.int32(0), size // LANES * LANES
    for i in range(size):
        left = np.float32(_shifted(values, shift, divided_by, i))
        largest = max(largest, np.int32(left.view(np.int32) & _MAGNITUDE))
    if largest >= INFINITY_BITS:
        return _spoiled(target, size)
    scale = _scale_of(largest)
    divisor, reciprocal, rounder = simd.splat(scale), simd.splat(_ONE / scale), simd.splat(_ROUNDER)
    for at in range(0, whole, LANES):
        taken = simd.multiply(simd.load(shift, at), simd.splat(divided_by))
        lanes = simd.subtract(simd.load(values, at), taken)
        simd.store_low_bytes(target, at, simd.add(quotient_lanes(lanes, divisor, reciprocal), rounder), ZERO_POINT)
    for i in range(whole, size):
        rounded = np.float32(_shifted(values, shift, divided_by, i) / scale + _ROUNDER).view(np.int32) - _ROUNDER_BITS
        target[i] = np.uint8(rounded + _ZERO_POINT)
    return scale * (_ONE / divided_by)


@entry_point(_VOID(_ROWS, _BYTES, _FLOATS, _I64, _COUNTER))
def quantize_rows(x: Any, values: Any, scales: Any, part_rows: int, next_part: Any) -> None:
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            source = simd.floats(x[row].ctypes.data)
            scales[row] = quantize_row(source, x.shape[1], simd.bytes_unsigned(values[row].ctypes.data))
        begin, end = next_rows(next_part, part_rows, x.shape[0])


@entry_point(_VOID(_ROWS, _F32, _FLOATS, _BYTES, _FLOATS, _I64, _COUNTER))
def rms_norm_quantize_rows(
    x: Any, eps: Any, offset: Any, values: Any, scales: Any, part_rows: int, next_part: Any
) -> None:
    """offset [K], or [0] for none."""
    width, shift = x.shape[1], offset.ctypes.data if offset.shape[0] else 0
    begin, end = next_rows(next_part, part_rows, x.shape[0])
    while begin < end:
        for row in range(begin, end):
            source, target = simd.floats(x[row].ctypes.data), simd.bytes_unsigned(values[row].ctypes.data)
            scales[row] = norm_quantize_row(source, shift, eps, width, target)
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
