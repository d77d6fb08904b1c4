"""Joins what partitions of attention over INT8 KV give, and writes it: sixteen rows' factors at once."""

from typing import Any

import numpy as np

from kernels.cpu import masks, simd
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import integer_power_lanes
from kernels.cpu.interleaving import WIDE, store_dimensions
from kernels.cpu.problem import Scratch
from kernels.cpu.simd import LANES

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inlined
def fold_bytes(scratch: Scratch, rows: int, part: Any, part_row: int) -> None:
    """Joins one partition's rows (pointers to peaks, masses and outputs, from `part_row` on) with the totals; a row
    that saw nothing in it stays as it was. Reads up to fifteen peaks and masses past the last row."""
    for row in range(0, rows, LANES):
        count = min(LANES, rows - row)
        _fold_peaks(scratch, row, count, part[0], part[1], part_row + row)
        for i in range(count):
            _fold_outputs(scratch, row + i, i, part[2], part_row + row + i)


@inlined
def _fold_peaks(scratch: Scratch, row: int, count: int, part_peaks: Any, part_masses: Any, part_row: int) -> None:
    part_peak, part_mass = simd.load(part_peaks, part_row), simd.lane_sums(part_masses, part_row * LANES)
    total_peak, total_mass = simd.load(scratch.total_peak, row), simd.load(scratch.total_mass, row)
    peak = simd.larger(total_peak, part_peak)
    old_factor = integer_power_lanes(simd.subtract(total_peak, peak))
    new_factor = integer_power_lanes(simd.subtract(part_peak, peak))
    peak = masks.choose_where_zero(part_mass, total_peak, peak)
    old_factor = masks.choose_where_zero(part_mass, simd.splat(_ONE), old_factor)
    new_factor = masks.choose_where_zero(part_mass, simd.splat(_ZERO), new_factor)
    mass = simd.fma(total_mass, old_factor, simd.multiply(part_mass, new_factor))
    simd.store(scratch.old_factors, 0, old_factor)
    simd.store(scratch.new_factors, 0, new_factor)
    # lanes past the last row belong to others
    simd.store(scratch.total_peak, row, masks.keep_between(peak, total_peak, np.int32(0), np.int32(count)))
    simd.store(scratch.total_mass, row, masks.keep_between(mass, total_mass, np.int32(0), np.int32(count)))


@inlined
def _fold_outputs(scratch: Scratch, row: int, i: int, part_outputs: Any, part_row: int) -> None:
    olds, news, width = simd.splat(scratch.old_factors[i]), simd.splat(scratch.new_factors[i]), scratch.width
    for d in range(0, width, LANES):
        added = simd.multiply(simd.load(part_outputs, part_row * width + d), news)
        total = simd.load(scratch.total_output, row * width + d)
        simd.store(scratch.total_output, row * width + d, simd.fma(total, olds, added))


@inlined
def invert_masses(scratch: Scratch, rows: int) -> None:
    for row in range(0, rows, LANES):
        masses = simd.load(scratch.total_mass, row)
        inverses = simd.divide(simd.splat(_ONE), masses)
        # lanes past the last row belong to others
        kept = masks.keep_between(inverses, masses, np.int32(0), np.int32(rows - row))
        simd.store(scratch.total_mass, row, kept)


@inlined
def write_row(scratch: Scratch, row: int, target: Any, target_at: int, head_dim: int) -> None:
    """The row's totals times its inverse mass, from columns to dimensions (fp32, from an element on)."""
    at, inverse, whole = row * scratch.width, scratch.total_mass[row], head_dim // WIDE * WIDE
    for d in range(0, whole, WIDE):
        store_dimensions(
            _value(scratch, at + d, inverse), _value(scratch, at + d + LANES, inverse),
            _value(scratch, at + d + 2 * LANES, inverse), _value(scratch, at + d + 3 * LANES, inverse),
            target, target_at + d,
        )  # fmt: skip
    for d in range(whole, head_dim):
        target[target_at + d] = simd.fma(scratch.total_output[at + d], inverse, _ZERO)


@inlined
def _value(scratch: Scratch, at: int, inverse: np.float32) -> Any:
    """Adding 0 makes a -0 a +0: a masked position's exact zero may have done so, or not."""
    return simd.fma(simd.load(scratch.total_output, at), simd.splat(inverse), simd.splat(_ZERO))
