"""Paged attention: one arithmetic for every query row, whatever else is in the batch.

A row's context is cut at fixed positions: partitions, and tiles within them. Tiles are joined by an online softmax,
partitions folded in ascending order. An INT8 layer's tiles are computed in integers (`byte_attention`), an unquantized
layer's in fp32 (`float_attention`). Masked positions add exact zeros.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.amx import configure_tiles, release_tiles
from kernels.cpu.byte_amx import TILED_ROWS
from kernels.cpu.byte_attention import attend_byte_partition, quantize_query
from kernels.cpu.byte_folding import fold_bytes, invert_masses, write_row
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import exp_fp32
from kernels.cpu.float_attention import attend_float_partition, scale_query
from kernels.cpu.plan import (
    END_PARTITION,
    FIRST_PARTITION,
    FIRST_QUERY,
    KV_HEAD,
    NOT_SPLIT,
    NUM_QUERIES,
    SEQUENCE,
    SLOT,
    unit_rows,
    visible,
)
from kernels.cpu.problem import Problem, Scratch
from kernels.cpu.simd import LANES

_ZERO = np.float32(0.0)
_NONE_YET = np.float32(-np.inf)


@inlined
def run_task(problem: Problem, unit: Any, begin: int, end: int, scratch: Scratch, slots: Any) -> None:
    """Partitions begin .. end of a unit: folded and written out, or (split units) left in the unit's slots.

    `slots` are pointers to peaks, masses and outputs as in `Scratch`, unit_rows(group_size) rows to a slot.
    """
    rows = unit[NUM_QUERIES] * problem.group_size
    own = (scratch.peak, scratch.mass, scratch.output)
    has_tiles = problem.layer.k_scale != 0 and rows >= TILED_ROWS and scratch.has_tiles
    if has_tiles:
        configure_tiles(TILED_ROWS, 0)
    _load_queries(problem, unit, scratch)
    _reset_total(scratch, rows)
    for partition in range(begin, end):
        _attend_partition(problem, unit, partition, scratch)
        if unit[SLOT] == NOT_SPLIT:
            _fold(problem, scratch, rows, own, 0)
        else:
            slot = unit[SLOT] + partition - unit[FIRST_PARTITION]
            _store_slot(scratch, rows, slots, slot * unit_rows(problem.group_size))
    if has_tiles:
        release_tiles()
    if unit[SLOT] == NOT_SPLIT:
        _write_output(problem, unit, scratch)


@inlined
def finish_split_unit(problem: Problem, unit: Any, scratch: Scratch, slots: Any) -> None:
    """Folds a split unit's slots as `run_task` folds partitions, and writes the output."""
    rows = unit[NUM_QUERIES] * problem.group_size
    _reset_total(scratch, rows)
    for slot in range(unit[SLOT], unit[SLOT] + unit[END_PARTITION] - unit[FIRST_PARTITION]):
        _fold(problem, scratch, rows, slots, slot * unit_rows(problem.group_size))
    _write_output(problem, unit, scratch)


@inlined
def _visible(problem: Problem, unit: Any, query: int) -> tuple[int, int]:
    query_start, context_lens = simd.ints32(problem.query_start), simd.ints32(problem.context_lens)
    return visible(query_start, context_lens, problem.window, unit[SEQUENCE], unit[FIRST_QUERY] + query)


@inlined
def _row_offset(problem: Problem, unit: Any, query: int) -> int:
    """Where the unit's query heads of one position start in `queries` and `output`."""
    token = simd.ints32(problem.query_start)[unit[SEQUENCE]] + unit[FIRST_QUERY] + query
    return (token * problem.layer.num_kv_heads + unit[KV_HEAD]) * problem.group_size * problem.layer.head_dim


@inlined
def _load_queries(problem: Problem, unit: Any, scratch: Scratch) -> None:
    head_dim = problem.layer.head_dim
    for i in range(unit[NUM_QUERIES]):
        queries = problem.queries + 4 * _row_offset(problem, unit, i)
        for g in range(problem.group_size):
            row = i * problem.group_size + g
            if problem.layer.k_scale == 0:
                scale_query(problem, queries + 4 * g * head_dim, row, scratch)
            else:
                quantize_query(problem, queries + 4 * g * head_dim, row, scratch)


@inlined
def _attend_partition(problem: Problem, unit: Any, partition: int, scratch: Scratch) -> None:
    first, first_end = _visible(problem, unit, 0)
    last_begin, last = _visible(problem, unit, unit[NUM_QUERIES] - 1)
    if problem.layer.k_scale == 0:
        attend_float_partition(problem, unit, partition, first, first_end, last, scratch)
    else:
        attend_byte_partition(problem, unit, partition, first, first_end, last_begin, last, scratch)


@inlined
def _reset_total(scratch: Scratch, rows: int) -> None:
    for row in range(rows):
        scratch.total_peak[row] = _NONE_YET
        scratch.total_mass[row] = _ZERO
    for at in range(0, rows * scratch.width, LANES):
        simd.store(scratch.total_output, at, simd.splat(_ZERO))


@inlined
def _fold(problem: Problem, scratch: Scratch, rows: int, part: Any, part_row: int) -> None:
    """Joins one partition's rows (peak, mass, output from `part_row` on) with the totals; a row that saw nothing in
    it stays as it was."""
    if problem.layer.k_scale != 0:
        fold_bytes(scratch, rows, part, part_row)
        return
    width = scratch.width
    for row in range(rows):
        part_peak = part[0][part_row + row]
        part_mass = simd.sum_lanes(simd.load(part[1], (part_row + row) * LANES))
        if part_mass == _ZERO:
            continue
        peak = max(scratch.total_peak[row], part_peak)
        old_factor, new_factor = exp_fp32(scratch.total_peak[row] - peak), exp_fp32(part_peak - peak)
        scratch.total_peak[row] = peak
        scratch.total_mass[row] = simd.fma(scratch.total_mass[row], old_factor, part_mass * new_factor)
        olds, news = simd.splat(old_factor), simd.splat(new_factor)
        for d in range(0, width, LANES):
            added = simd.multiply(simd.load(part[2], (part_row + row) * width + d), news)
            total = simd.load(scratch.total_output, row * width + d)
            simd.store(scratch.total_output, row * width + d, simd.fma(total, olds, added))


@inlined
def _store_slot(scratch: Scratch, rows: int, slots: Any, slot_row: int) -> None:
    for row in range(rows):
        slots[0][slot_row + row] = scratch.peak[row]
    for at in range(0, rows * LANES, LANES):
        simd.store(slots[1], slot_row * LANES + at, simd.load(scratch.mass, at))
    for at in range(0, rows * scratch.width, LANES):
        simd.store(slots[2], slot_row * scratch.width + at, simd.load(scratch.output, at))


@inlined
def _write_output(problem: Problem, unit: Any, scratch: Scratch) -> None:
    output, head_dim, width = simd.floats(problem.output), problem.layer.head_dim, scratch.width
    is_quantized = problem.layer.k_scale != 0
    if is_quantized:
        invert_masses(scratch, unit[NUM_QUERIES] * problem.group_size)
    for i in range(unit[NUM_QUERIES]):
        for g in range(problem.group_size):
            target, row = _row_offset(problem, unit, i) + g * head_dim, i * problem.group_size + g
            if is_quantized:
                write_row(scratch, row, output, target, head_dim)
                continue
            for d in range(head_dim):
                # + 0: a masked position's exact zero may have turned a -0 into +0, or not
                output[target + d] = scratch.total_output[row * width + d] / scratch.total_mass[row] + _ZERO
