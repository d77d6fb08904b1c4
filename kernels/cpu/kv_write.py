"""Compiled KV write: quantizes each vector of K and V, bit for bit as `Ops.write_kv` specifies, into its slot."""

from typing import Any

import numba
import numpy as np

from kernels.contract import QUANT_MAX, SCALE_FLOOR
from kernels.cpu import simd
from kernels.cpu.compiling import compiled, entry_point
from kernels.cpu.elementary import (
    INFINITY_BITS,
    fp16_to_fp32,
    fp32_to_fp16,
    largest_magnitude_bits,
    quotient_lanes,
)
from kernels.cpu.problem import LAYER_FIELDS, Layer
from kernels.cpu.rows import next_rows
from kernels.cpu.simd import LANES

_I64, _TENSOR = numba.types.int64, numba.types.float32[:, :, ::1]

_ONE = np.float32(1.0)
_QUANT_MAX = np.float32(QUANT_MAX)
_SCALE_FLOOR = np.float32(SCALE_FLOOR)
_SCALE_END = np.float32(65520.0)  # from here on fp16 rounds to infinity
_ROUNDER = np.float32(3 << 22)  # adding and subtracting it rounds to the nearest integer, ties to even


@entry_point(_I64(_I64[::1], _I64))
def first_bad_slot(slot_mapping: np.ndarray, num_slots: int) -> int:
    """Index of the first slot that is not in the pool, or -1."""
    for i in range(slot_mapping.shape[0]):
        if not 0 <= slot_mapping[i] < num_slots:
            return i
    return -1


@compiled
def _quantize(values: Any, source: int, size: int, target: Any, at: int, scales: Any, scale_at: int) -> np.int32:
    """Returns 1 where the vector cannot be represented, and was written as zeros; else 0."""
    largest = largest_magnitude_bits(values, source, size)
    scale = max(np.int32(largest).view(np.float32) / _QUANT_MAX, _SCALE_FLOOR)
    if largest >= INFINITY_BITS or scale >= _SCALE_END:
        for i in range(size):
            target[at + i] = np.int8(0)
        scales[scale_at] = fp32_to_fp16(_SCALE_FLOOR)
        return np.int32(1)
    scale_bits = fp32_to_fp16(scale)
    divisor = fp16_to_fp32(scale_bits)
    lowest, highest = simd.splat(_ROUNDER - _QUANT_MAX), simd.splat(_ROUNDER + _QUANT_MAX)
    divisors, reciprocals = simd.splat(divisor), simd.splat(_ONE / divisor)
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        quotients = quotient_lanes(simd.load(values, source + i), divisors, reciprocals)
        shifted = simd.add(quotients, simd.splat(_ROUNDER))
        simd.store_low_bytes(target, at + i, simd.smaller(simd.larger(shifted, lowest), highest), 0)
    for i in range(whole, size):
        rounded = (values[source + i] / divisor + _ROUNDER) - _ROUNDER
        target[at + i] = np.int8(min(max(rounded, -_QUANT_MAX), _QUANT_MAX))
    scales[scale_at] = scale_bits
    return np.int32(0)


@compiled
def _copy(values: Any, source: int, size: int, target: Any, at: int) -> np.int32:
    """Returns 1 where the vector has a NaN or an Inf, and was written as zeros; else 0."""
    if largest_magnitude_bits(values, source, size) >= INFINITY_BITS:
        for i in range(size):
            target[at + i] = np.float32(0.0)
        return np.int32(1)
    for i in range(size):
        target[at + i] = values[source + i]
    return np.int32(0)


@compiled
def write_position(layer: Layer, slot: int, k: Any, v: Any) -> np.int32:
    """K and V [num_kv_heads, head_dim] fp32 of one token; returns how many heads cannot be represented."""
    block, offset = slot // layer.block_size, slot % layer.block_size
    bad = np.int32(0)
    for head in range(layer.num_kv_heads):
        at = block * layer.block_stride + head * layer.head_stride + offset * layer.position_stride
        source = head * layer.head_dim
        if layer.k_scale == 0:
            bad += _copy(k, source, layer.head_dim, simd.floats(layer.k), at)
            bad += _copy(v, source, layer.head_dim, simd.floats(layer.v), at)
        else:
            scale_at = block * layer.scale_block_stride + head * layer.scale_head_stride
            scale_at += offset * layer.scale_position_stride
            k_target, v_target = simd.bytes_signed(layer.k), simd.bytes_signed(layer.v)
            bad += _quantize(k, source, layer.head_dim, k_target, at, simd.halves(layer.k_scale), scale_at)
            bad += _quantize(v, source, layer.head_dim, v_target, at, simd.halves(layer.v_scale), scale_at)
    return bad


@entry_point(numba.types.void(_TENSOR, _TENSOR, LAYER_FIELDS, _I64[::1], numba.types.int32[::1], _I64, _I64[::1]))
def write_kv_rows(
    k: Any, v: Any, layer_fields: tuple[int, ...], slot_mapping: Any, nonfinite: Any, part_rows: int, next_part: Any
) -> None:
    """See `rows` for `part_rows` and `next_part`. Precondition: slots are distinct and in the pool."""
    layer = Layer(*layer_fields)
    begin, end = next_rows(next_part, part_rows, k.shape[0])
    while begin < end:
        for row in range(begin, end):
            k_row, v_row = simd.floats(k[row].ctypes.data), simd.floats(v[row].ctypes.data)
            nonfinite[row] += write_position(layer, slot_mapping[row], k_row, v_row)
        begin, end = next_rows(next_part, part_rows, k.shape[0])
