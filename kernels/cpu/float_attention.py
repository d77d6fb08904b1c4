"""One partition of attention over unquantized keys and values, in fp32.

Each score is one chain of fused multiply-adds over the head's dimensions, each output one chain over the tile's
positions.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import exp_fp32, exp_lanes
from kernels.cpu.plan import KV_HEAD, NUM_QUERIES, PARTITION, SEQUENCE, TILE
from kernels.cpu.problem import Problem, Scratch
from kernels.cpu.products import MAX_ROWS, add_product
from kernels.cpu.simd import LANES
from kernels.cpu.tiles import load_tile

_ZERO = np.float32(0.0)
_NONE_YET = np.float32(-np.inf)


@inlined
def scale_query(problem: Problem, queries: int, row: int, scratch: Scratch) -> None:
    """The fp32 query at address `queries` becomes the scratch's `row`."""
    source, size = simd.floats(queries), problem.layer.head_dim
    for n in range(size):
        scratch.queries[row * size + n] = source[n] * problem.scale


@inlined
def attend_float_partition(
    problem: Problem, unit: Any, partition: int, first: int, first_end: int, last: int, scratch: Scratch
) -> None:
    """The unit's first query sees positions first .. first_end, its last query up to `last`."""
    rows = unit[NUM_QUERIES] * problem.group_size
    for row in range(rows):
        scratch.peak[row] = _NONE_YET
    for at in range(0, rows * LANES, LANES):
        simd.store(scratch.mass, at, simd.splat(_ZERO))
    for at in range(0, rows * scratch.width, LANES):
        simd.store(scratch.output, at, simd.splat(_ZERO))
    for start in range(partition * PARTITION, min((partition + 1) * PARTITION, last), TILE):
        if start + TILE > first:
            load_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start, min(TILE, last - start), scratch)
            for row in range(0, rows, MAX_ROWS):
                _attend_rows(problem, row, min(MAX_ROWS, rows - row), start, first_end, scratch)


@inlined
def _seen(problem: Problem, first_end: int, row: int) -> tuple[int, int]:
    """Positions begin .. end that a row attends to."""
    end = first_end + row // problem.group_size
    return (max(0, end - problem.window) if problem.window > 0 else 0), end


@inlined
def _attend_rows(problem: Problem, row: int, count: int, start: int, first_end: int, scratch: Scratch) -> None:
    """Joins rows row .. row + count with the loaded tile at position `start`."""
    first, _ = _seen(problem, first_end, row)
    _, last = _seen(problem, first_end, row + count - 1)
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
        begin, end = _seen(problem, first_end, row + i)
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
