"""Paged attention: one arithmetic for every query row, whatever else is in the batch.

A row's context is cut at fixed positions: partitions, and tiles within them. Within a tile each score is one chain of
fused multiply-adds over the head's dimensions, each output one chain over the tile's positions; tiles are joined by
an online softmax, partitions folded in ascending order. Masked positions add exact zeros.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import exp_fp32, exp_lanes
from kernels.cpu.plan import (
    END_PARTITION,
    FIRST_PARTITION,
    FIRST_QUERY,
    KV_HEAD,
    NOT_SPLIT,
    NUM_QUERIES,
    PARTITION,
    SEQUENCE,
    SLOT,
    TILE,
    unit_rows,
    visible,
)
from kernels.cpu.problem import Problem, Scratch
from kernels.cpu.products import MAX_ROWS, add_product
from kernels.cpu.simd import LANES
from kernels.cpu.tiles import load_tile

_ZERO = np.float32(0.0)
_NONE_YET = np.float32(-np.inf)


@inlined
def run_task(problem: Problem, unit: Any, begin: int, end: int, scratch: Scratch, slots: Any) -> None:
    """Partitions begin .. end of a unit: folded and written out, or (split units) left in the unit's slots.

    `slots` are pointers to peaks, masses and outputs as in `Scratch`, unit_rows(group_size) rows to a slot.
    """
    rows = unit[NUM_QUERIES] * problem.group_size
    own = (scratch.peak, scratch.mass, scratch.output)
    _load_queries(problem, unit, scratch)
    _reset_total(scratch, rows)
    for partition in range(begin, end):
        _attend_partition(problem, unit, partition, scratch)
        if unit[SLOT] == NOT_SPLIT:
            _fold(scratch, rows, own, 0)
        else:
            slot = unit[SLOT] + partition - unit[FIRST_PARTITION]
            _store_slot(scratch, rows, slots, slot * unit_rows(problem.group_size))
    if unit[SLOT] == NOT_SPLIT:
        _write_output(problem, unit, scratch)


@inlined
def finish_split_unit(problem: Problem, unit: Any, scratch: Scratch, slots: Any) -> None:
    """Folds a split unit's slots as `run_task` folds partitions, and writes the output."""
    rows = unit[NUM_QUERIES] * problem.group_size
    _reset_total(scratch, rows)
    for slot in range(unit[SLOT], unit[SLOT] + unit[END_PARTITION] - unit[FIRST_PARTITION]):
        _fold(scratch, rows, slots, slot * unit_rows(problem.group_size))
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
    queries, size = simd.floats(problem.queries), problem.group_size * problem.layer.head_dim
    for i in range(unit[NUM_QUERIES]):
        source = _row_offset(problem, unit, i)
        for n in range(size):
            scratch.queries[i * size + n] = queries[source + n] * problem.scale


@inlined
def _attend_partition(problem: Problem, unit: Any, partition: int, scratch: Scratch) -> None:
    rows = unit[NUM_QUERIES] * problem.group_size
    for row in range(rows):
        scratch.peak[row] = _NONE_YET
    for at in range(0, rows * LANES, LANES):
        simd.store(scratch.mass, at, simd.splat(_ZERO))
    for at in range(0, rows * scratch.width, LANES):
        simd.store(scratch.output, at, simd.splat(_ZERO))
    first, _ = _visible(problem, unit, 0)
    _, last = _visible(problem, unit, unit[NUM_QUERIES] - 1)
    for start in range(partition * PARTITION, min((partition + 1) * PARTITION, last), TILE):
        if start + TILE > first:
            load_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start, min(TILE, last - start), scratch)
            for row in range(0, rows, MAX_ROWS):
                _attend_rows(problem, unit, row, min(MAX_ROWS, rows - row), start, scratch)


@inlined
def _attend_rows(problem: Problem, unit: Any, row: int, count: int, start: int, scratch: Scratch) -> None:
    """Joins rows row .. row + count with the loaded tile at position `start`."""
    first, _ = _visible(problem, unit, row // problem.group_size)
    _, last = _visible(problem, unit, (row + count - 1) // problem.group_size)
    if last <= start or first >= start + TILE:
        return
    head_dim, width, scores = problem.layer.head_dim, scratch.width, scratch.scores
    for at in range(0, count * TILE, LANES):
        simd.store(scores, at, simd.splat(_ZERO))
    add_product(
        count, TILE // LANES, scores, 0, TILE, scratch.queries, row * head_dim, head_dim, scratch.keys, 0, TILE,
        head_dim,
    )  # fmt: skip
    for i in range(count):
        begin, end = _visible(problem, unit, (row + i) // problem.group_size)
        begin, end = max(0, begin - start), min(TILE, end - start)
        if begin < end:
            _weigh(scratch, row + i, i * TILE, begin, end)
        else:
            _mask(scores, i * TILE, 0, 0, _ZERO)
    first, last = max(0, first - start), min(TILE, last - start)  # what none of these rows sees is not even read
    add_product(
        count, width // LANES, scratch.output, row * width, width, scores, first, TILE, scratch.values, first * width,
        width, last - first,
    )  # fmt: skip


@inlined
def _weigh(scratch: Scratch, row: int, at: int, begin: int, end: int) -> None:
    """Scores [at, at + TILE) -> weights of the values; the row's peak, mass and output move to the new peak.

    Only positions begin .. end of the tile count.
    """
    scores = scratch.scores
    for j in range(0, TILE, LANES):
        simd.store(scores, at + j, simd.multiply(simd.load(scores, at + j), simd.load(scratch.key_scales, j)))
    _mask(scores, at, begin, end, _NONE_YET)
    top = simd.load(scores, at)
    for j in range(LANES, TILE, LANES):
        top = simd.larger(top, simd.load(scores, at + j))
    tile_peak = simd.largest_lane(top)
    if tile_peak > scratch.peak[row]:
        _rescale(scratch, row, exp_fp32(scratch.peak[row] - tile_peak))
        scratch.peak[row] = tile_peak
    peak = simd.splat(scratch.peak[row])
    for j in range(0, TILE, LANES):
        simd.store(scores, at + j, exp_lanes(simd.subtract(simd.load(scores, at + j), peak)))
    _mask(scores, at, begin, end, _ZERO)
    mass = simd.load(scratch.mass, row * LANES)
    for j in range(0, TILE, LANES):
        weights = simd.load(scores, at + j)
        mass = simd.add(mass, weights)
        simd.store(scores, at + j, simd.multiply(weights, simd.load(scratch.value_scales, j)))
    simd.store(scratch.mass, row * LANES, mass)


@inlined
def _mask(scores: Any, at: int, begin: int, end: int, value: np.float32) -> None:
    for j in range(begin):
        scores[at + j] = value
    for j in range(end, TILE):
        scores[at + j] = value


@inlined
def _rescale(scratch: Scratch, row: int, factor: np.float32) -> None:
    factors = simd.splat(factor)
    simd.store(scratch.mass, row * LANES, simd.multiply(simd.load(scratch.mass, row * LANES), factors))
    for at in range(row * scratch.width, (row + 1) * scratch.width, LANES):
        simd.store(scratch.output, at, simd.multiply(simd.load(scratch.output, at), factors))


@inlined
def _reset_total(scratch: Scratch, rows: int) -> None:
    for row in range(rows):
        scratch.total_peak[row] = _NONE_YET
        scratch.total_mass[row] = _ZERO
    for at in range(0, rows * scratch.width, LANES):
        simd.store(scratch.total_output, at, simd.splat(_ZERO))


@inlined
def _fold(scratch: Scratch, rows: int, part: Any, part_row: int) -> None:
    """Joins one partition's rows (peak, mass, output from `part_row` on) with the totals; a row that saw nothing in
    it stays as it was."""
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
    output = simd.floats(problem.output)
    for i in range(unit[NUM_QUERIES]):
        target = _row_offset(problem, unit, i)
        for g in range(problem.group_size):
            row = i * problem.group_size + g
            for d in range(problem.layer.head_dim):
                value = scratch.total_output[row * scratch.width + d] / scratch.total_mass[row]
                # + 0: a masked position's exact zero may have turned a -0 into +0, or not
                output[target + g * problem.layer.head_dim + d] = value + _ZERO
