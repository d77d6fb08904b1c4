"""One partition of attention over INT8 keys and values: products exact in integers, the rest a fixed chain per row.

Queries, times the softmax scale: Q = rint(q * 16256 / largest |q|) = 128 * high + low, both int8. A score is
fp32(Q . K) * k_scale * factor, factor = largest |q| / 16256 * log2(e), so that a weight is 2^(score - peak), the peak
being the largest score so far. Weights w = 2^(score - peak) * v_scale become W = rint(w * 2^n), with n such that the
tile's largest is 32768 .. 65535, = 256 * high + low, both uint8; output = fma(fp32(W . V), 2^-n, output * the change of
peak). Masses are sums of unquantized weights, by lane. Masked positions have W = 0. A row's tile so depends on nothing
but the row and what it sees: neither on other rows nor on the order of sums within a product.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.byte_amx import TILED_ROWS, tiled_key_product, tiled_value_product
from kernels.cpu.byte_products import key_product, value_product
from kernels.cpu.byte_tiles import WORD, fetch_byte_tile, load_byte_tile
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import exp2_lanes, largest_magnitude_bits
from kernels.cpu.interleaving import split_bytes
from kernels.cpu.plan import KV_HEAD, NUM_QUERIES, PARTITION, SEQUENCE, TILE
from kernels.cpu.problem import CHUNK_ROWS, Problem, Scratch
from kernels.cpu.simd import LANES

QUERY_MAX = 127 * 128

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_NONE_YET = np.float32(-np.inf)
_QUERY_MAX = np.float32(QUERY_MAX)
_QUERY_FLOOR = np.float32(2.0**-100)  # of the largest |q|, so that its inverse is finite
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer, ties to even, in the low bits
_ROUNDER_BITS = np.int32(_ROUNDER.view(np.int32))
_WEIGHT_ROUNDER = np.float32(1 << 23)  # the same for integers that are not negative


@inlined
def quantize_query(problem: Problem, queries: int, row: int, scratch: Scratch) -> None:
    """The fp32 query at address `queries` becomes the scratch's `row`; one with a NaN or Inf gets a factor of NaN."""
    source, head_dim, depth = simd.floats(queries), problem.layer.head_dim, scratch.depth
    largest = np.int32(largest_magnitude_bits(source, 0, head_dim)).view(np.float32) * problem.scale
    is_bad = not largest < np.inf
    largest = max(largest, _QUERY_FLOOR)
    inverse, at, total = _QUERY_MAX / largest, row * 2 * depth, np.int32(0)
    for d in range(2 * depth):
        scratch.query_bytes[at + d] = np.int8(0)
    if is_bad:
        scratch.query_factors[row] = np.float32(np.nan)
    else:
        scratch.query_factors[row] = largest / _QUERY_MAX * _LOG2_E
        for d in range(head_dim):
            scaled = np.float32(source[d] * problem.scale) * inverse
            value = np.int32(np.float32(scaled + _ROUNDER).view(np.int32) - _ROUNDER_BITS)
            high = np.int32(value + np.int32(64)) >> np.int32(7)
            scratch.query_bytes[at + d] = np.int8(high)
            scratch.query_bytes[at + depth + d] = np.int8(value - (high << np.int32(7)))
            total += value
    scratch.query_starts[row] = total * np.int32(-128)  # keys are 128 higher than they should be


@inlined
def attend_byte_partition(
    problem: Problem, unit: Any, partition: int, first: int, first_end: int, last_begin: int, last: int,
    scratch: Scratch,
) -> None:  # fmt: skip
    """The unit's first query sees positions first .. first_end, its last query last_begin .. last."""
    rows = unit[NUM_QUERIES] * problem.group_size
    for row in range(rows):
        scratch.peak[row] = _NONE_YET
        simd.store(scratch.mass, row * LANES, simd.splat(scratch.query_factors[row] * _ZERO))
    for at in range(0, rows * scratch.width, LANES):
        simd.store(scratch.output, at, simd.splat(_ZERO))
    for start in range(partition * PARTITION, min((partition + 1) * PARTITION, last), TILE):
        if start + TILE > first:
            fetch_byte_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start + TILE, min(start + 2 * TILE, last))
            load_byte_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start, min(TILE, last - start), scratch)
            is_whole = last_begin <= start and start + TILE <= first_end
            row, end_row = 0, rows
            if not is_whole:  # queries that see nothing of the tile
                row = max(0, start - first_end + 1) * problem.group_size
                if problem.window > 0:
                    end_row = min(rows, (start + TILE + problem.window - first_end) * problem.group_size)
            while row < end_row:
                count = min(CHUNK_ROWS, end_row - row)
                _attend_rows(problem, row, count, start, first_end, is_whole, scratch)
                row += count


@inlined
def _attend_rows(
    problem: Problem, row: int, count: int, start: int, first_end: int, is_whole: bool, scratch: Scratch
) -> None:
    """Joins rows row .. row + count, which all see something of it, with the loaded tile at position `start`."""
    _multiply_keys(problem, row, count, scratch)
    for i in range(count):
        begin, end = _seen(problem, row + i, start, first_end, is_whole)
        _score(scratch, row + i, i, begin, end)
    _raise_peaks(scratch, row, count)
    for i in range(count):
        begin, end = _seen(problem, row + i, start, first_end, is_whole)
        _weigh(scratch, row + i, i, begin, end)
    _quantize_weights(scratch, count)
    _multiply_values(count, scratch)
    width = scratch.width
    for i in range(count):
        olds, news = simd.splat(scratch.old_factors[i]), simd.splat(scratch.new_factors[i])
        for d in range(0, width, LANES):
            at = (row + i) * width + d
            old = simd.multiply(simd.load(scratch.output, at), olds)
            simd.store(scratch.output, at, simd.fma(simd.load_words(scratch.products, i * width + d), news, old))


@inlined
def _multiply_keys(problem: Problem, row: int, count: int, scratch: Scratch) -> None:
    depth, tiled = scratch.depth, count // TILED_ROWS * TILED_ROWS if scratch.has_tiles else 0
    for i in range(0, tiled, TILED_ROWS):
        tiled_key_product(
            scratch.products, i * TILE, TILE, scratch.query_starts, row + i, scratch.query_bytes, (row + i) * 2 * depth,
            2 * depth, depth, scratch.key_words, depth // WORD,
        )  # fmt: skip
    if tiled < count:
        key_product(
            count - tiled, scratch.products, tiled * TILE, TILE, scratch.query_starts, row + tiled, scratch.query_bytes,
            (row + tiled) * 2 * depth, 2 * depth, depth, scratch.key_words, -(-problem.layer.head_dim // WORD),
        )  # fmt: skip


@inlined
def _multiply_values(count: int, scratch: Scratch) -> None:
    width, tiled = scratch.width, 0
    if scratch.has_tiles and width > LANES:
        tiled = count // TILED_ROWS * TILED_ROWS
    for i in range(0, tiled, TILED_ROWS):
        tiled_value_product(
            width // LANES, scratch.products, i * width, width, scratch.zeros, scratch.weight_bytes, i * 2 * TILE,
            2 * TILE, TILE, scratch.value_words, width * WORD, TILE // WORD,
        )  # fmt: skip
    if tiled < count:
        value_product(
            count - tiled, width // LANES, scratch.products, tiled * width, width, scratch.zeros, scratch.weight_bytes,
            tiled * 2 * TILE, 2 * TILE, TILE, scratch.value_words, 0, width * WORD, TILE // WORD,
        )  # fmt: skip


@inlined
def _seen(problem: Problem, row: int, start: int, first_end: int, is_whole: bool) -> tuple[int, int]:
    """Positions begin .. end of the tile at `start` that a row attends to."""
    if is_whole:
        return 0, TILE
    end = first_end + row // problem.group_size - start
    return (max(0, end - problem.window) if problem.window > 0 else 0), min(TILE, end)


@inlined
def _score(scratch: Scratch, row: int, i: int, begin: int, end: int) -> None:
    """Products of the chunk's row `i` -> scores and, by lane, the largest; -Inf outside begin .. end of the tile."""
    at, scores = i * TILE, scratch.scores
    factor, top = simd.splat(scratch.query_factors[row]), simd.splat(_NONE_YET)
    for j in range(0, TILE, LANES):
        product = simd.multiply(simd.load_words(scratch.products, at + j), simd.load(scratch.key_scales, j))
        score = simd.multiply(product, factor)
        if begin > 0 or end < TILE:
            score = simd.keep_between(score, simd.splat(_NONE_YET), np.int32(begin - j), np.int32(end - j))
        simd.store(scores, at + j, score)
        top = simd.larger(score, top)
    simd.store(scratch.tops, i * LANES, top)


@inlined
def _raise_peaks(scratch: Scratch, row: int, count: int) -> None:
    """Sixteen rows at a time; lanes past `count` are other rows', and stay."""
    for i in range(0, count, LANES):
        old = simd.load(scratch.peak, row + i)
        new = simd.larger(simd.largest_lanes(scratch.tops, i * LANES), old)
        simd.store(scratch.old_factors, i, exp2_lanes(simd.subtract(old, new)))
        simd.store(scratch.peak, row + i, simd.keep_between(new, old, np.int32(0), np.int32(count - i)))


@inlined
def _weigh(scratch: Scratch, row: int, i: int, begin: int, end: int) -> None:
    """Scores of the chunk's row `i` -> weights times the values' scales and, by lane, the largest; adds to the mass."""
    at, scores = i * TILE, scratch.scores
    peak, top = simd.splat(scratch.peak[row]), simd.splat(_ZERO)
    mass = simd.multiply(simd.load(scratch.mass, row * LANES), simd.splat(scratch.old_factors[i]))
    for j in range(0, TILE, LANES):
        weight = exp2_lanes(simd.subtract(simd.load(scores, at + j), peak))
        scaled = simd.multiply(weight, simd.load(scratch.value_scales, j))
        if begin > 0 or end < TILE:
            weight = simd.keep_between(weight, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))
            scaled = simd.keep_between(scaled, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))
        mass = simd.add(mass, weight)
        simd.store(scores, at + j, scaled)
        top = simd.larger(scaled, top)
    simd.store(scratch.mass, row * LANES, mass)
    simd.store(scratch.tops, i * LANES, top)


@inlined
def _quantize_weights(scratch: Scratch, count: int) -> None:
    for i in range(0, count, LANES):
        powers = simd.power_to_fill_16_bits(simd.largest_lanes(scratch.tops, i * LANES))
        simd.store(scratch.raising_factors, i, powers)
        simd.store(scratch.new_factors, i, simd.divide(simd.splat(_ONE), powers))
    for i in range(count):
        at, factor = i * TILE, simd.splat(scratch.raising_factors[i])
        for j in range(0, TILE, LANES):
            raised = simd.fma(simd.load(scratch.scores, at + j), factor, simd.splat(_WEIGHT_ROUNDER))
            simd.store(scratch.scores, at + j, raised)
        split_bytes(scratch.products, at, scratch.weight_bytes, i * 2 * TILE, TILE)
