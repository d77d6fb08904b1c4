"""One partition of attention over INT8 keys and values: products exact in integers, the rest a fixed chain per row.

Queries, times the softmax scale: Q = rint(q * 127 / largest |q|), int8. A score is a * factor;
a = fp32(Q . K) * k_scale, factor = largest |q| / 127 * log2(e), so that weights are powers of two. The bound is the
tile's largest score, rounded up to a 32nd; w = 2^(score - bound), whose exponent is rounded to 32nds, and the
values' weights are W = rint(w * ratio), uint8, where ratio = rint(v_scale * 255 / largest v_scale), the largest being
of the positions that the row sees (`weights` says how). The mass grows by sums of w * 2^(bound - peak), by lane, and
output = fma(fp32(W . V), largest v_scale / 255 * 2^(bound - peak), output). The peak is an integer, above a bound so
far; sums move to a new one only when a bound is much higher, which changes none of their bits. Masked positions have
w = 0. A row's tile so depends on nothing but the row and what it sees: neither on other rows nor on the order of sums
within a product.
"""

from typing import Any

import numpy as np

from kernels.cpu import masks, simd
from kernels.cpu.byte_amx import TILED_COLUMNS, TILED_ROWS, tiled_key_product, tiled_value_product
from kernels.cpu.byte_products import key_product, value_product
from kernels.cpu.byte_tiles import WORD, fetch_byte_tile, load_byte_tile
from kernels.cpu.chunk_loops import add_rows, score_rows
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import integer_power_lanes, largest_magnitude_bits, power_lanes
from kernels.cpu.interleaving import WIDE
from kernels.cpu.plan import KV_HEAD, NUM_QUERIES, PARTITION, SEQUENCE, TILE
from kernels.cpu.problem import CHUNK_ROWS, Problem, Scratch
from kernels.cpu.simd import LANES
from kernels.cpu.weights import DISTANCE_BITS, WEIGHT_ONE, weigh_rows, write_ratios

QUERY_MAX = 127

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NONE_YET = np.float32(-np.inf)
_INFINITY = np.float32(np.inf)
_QUERY_MAX = np.float32(QUERY_MAX)
_QUERY_FLOOR = np.float32(2.0**-100)  # of the largest |q|, so that its inverse is finite
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer, ties to even, in the low bits
_ROUNDER_BITS = np.int32(_ROUNDER.view(np.int32))
_WEIGHT_MAX = np.float32(255.0)
_DISTANCE_ONE = np.float32(1 << DISTANCE_BITS)
_MASS_UNIT = np.float32(1.0 / WEIGHT_ONE)
_PEAK_MARGIN = np.float32(16.0)  # how far a bound is above the peak before sums are moved to it
_ULP = np.float32(2.0**-23)
_weigh_rows = weigh_rows()


@inlined
def quantize_query(problem: Problem, queries: int, row: int, scratch: Scratch) -> None:
    """The fp32 query at address `queries` becomes the scratch's `row`; one with a NaN or Inf gets a factor of NaN."""
    source, head_dim, depth = simd.floats(queries), problem.layer.head_dim, scratch.depth
    largest = np.int32(largest_magnitude_bits(source, 0, head_dim)).view(np.float32) * problem.scale
    is_bad = not largest < np.inf
    largest = max(largest, _QUERY_FLOOR)
    inverse, at, total = _QUERY_MAX / largest, row * depth, np.int32(0)
    for d in range(depth):
        scratch.query_bytes[at + d] = np.int8(0)
    if is_bad:
        scratch.query_factors[row] = np.float32(np.nan)
        scratch.query_slopes[row] = np.float32(np.nan)
    else:
        scratch.query_factors[row] = largest / _QUERY_MAX * _LOG2_E
        scratch.query_slopes[row] = scratch.query_factors[row] * -_DISTANCE_ONE
        for d in range(head_dim):
            scaled = np.float32(source[d] * problem.scale) * inverse
            value = np.int32(np.float32(scaled + _ROUNDER).view(np.int32) - _ROUNDER_BITS)
            scratch.query_bytes[at + d] = np.int8(value)
            total += value
    scratch.query_starts[row] = total * np.int32(-128)  # what `key_product` adds to keys


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
    begin, loaded = partition * PARTITION, -1
    while begin < min((partition + 1) * PARTITION, last):
        end, start = _span_end(begin), begin // TILE * TILE
        if end > first:
            if loaded != start:
                fetch_byte_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start + TILE, min(start + 2 * TILE, last))
                load_byte_tile(problem, unit[SEQUENCE], unit[KV_HEAD], start, min(TILE, last - start), scratch)
                loaded = start
            is_seen_by_all = last_begin <= begin and end <= first_end
            if is_seen_by_all:
                scratch.value_scale_tops[0] = _scale_weights(scratch, begin - start, end - start)
            row, end_row = 0, rows
            if not is_seen_by_all:  # queries that see nothing of the span
                row = max(0, begin - first_end + 1) * problem.group_size
                if problem.window > 0:
                    end_row = min(rows, (end + problem.window - first_end) * problem.group_size)
            if row < end_row:
                _attend_rows(problem, row, end_row, begin, end, first_end, is_seen_by_all, scratch)
        begin = end


@inlined
def _span_end(begin: int) -> int:
    """A span, which has a bound and a scale of weights of its own, is a tile. But the first position is one by itself:
    most heads park their weight there, on small values, beside which the weights of others would be few steps."""
    return 1 if begin == 0 else (begin // TILE + 1) * TILE


@inlined
def _attend_rows(
    problem: Problem, begin_row: int, end_row: int, begin: int, end: int, first_end: int, is_seen_by_all: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    """Joins rows begin_row .. end_row, which all see something of it, with the span begin .. end of the loaded tile.

    Products take long before their first result, and nothing of the CPU's other units. So those of the next rows' keys
    start before these rows are weighed, and those of the values end while the next rows' scores are made.
    """
    num_chunks = -(-(end_row - begin_row) // CHUNK_ROWS)
    for step in range(num_chunks + 2):
        if step < num_chunks:
            row, first = begin_row + step * CHUNK_ROWS, step % 2 * CHUNK_ROWS
            _multiply_keys(problem, row, min(CHUNK_ROWS, end_row - row), first, scratch)
        done_row = begin_row + (step - 2) * CHUNK_ROWS
        if step >= 2:
            _multiply_values(min(CHUNK_ROWS, end_row - done_row), scratch)
        if 1 <= step <= num_chunks:
            row, first = begin_row + (step - 1) * CHUNK_ROWS, (step - 1) % 2 * CHUNK_ROWS
            count = min(CHUNK_ROWS, end_row - row)
            if is_seen_by_all:
                _weigh_whole_span(row, count, first, begin, end, scratch)
            else:
                _weigh_seen(problem, row, count, first, begin, end, first_end, scratch)
        if step >= 2:
            _add_outputs(done_row, min(CHUNK_ROWS, end_row - done_row), step % 2 * CHUNK_ROWS, scratch)


@inlined
def _weigh_whole_span(row: int, count: int, first: int, begin: int, end: int, scratch: Scratch) -> None:
    """The scores' rows from `first` on, products until now, to the values' weights."""
    if end - begin == TILE:
        score_rows(count, scratch.score_words, first * TILE, scratch.key_scales, scratch.tops)
    else:
        for i in range(count):
            _score(scratch, first + i, i, begin % TILE, begin % TILE + end - begin)
    _bound(scratch, row, count)
    _weigh(scratch, row, first, count)
    factors = simd.multiply(simd.load(scratch.tile_factors, 0), simd.splat(scratch.value_scale_tops[0] / _WEIGHT_MAX))
    simd.store(scratch.new_factors, first, factors)


@inlined
def _weigh_seen(
    problem: Problem, row: int, count: int, first: int, begin: int, end: int, first_end: int, scratch: Scratch
) -> None:
    """The same, where rows see different parts of the span."""
    for i in range(count):
        seen, seen_end = _seen(problem, row + i, begin, end, first_end)
        _score(scratch, first + i, i, seen, seen_end)
    _bound(scratch, row, count)
    for i in range(count):
        seen, seen_end = _seen(problem, row + i, begin, end, first_end)
        top = _scale_weights(scratch, seen, seen_end)
        scratch.new_factors[first + i] = scratch.tile_factors[i] * (top / _WEIGHT_MAX)
        _weigh(scratch, row + i, first + i, 1)


@inlined
def _add_outputs(row: int, count: int, first: int, scratch: Scratch) -> None:
    width = scratch.width
    if width == WIDE:
        add_rows(count, scratch.products, scratch.new_factors, first, scratch.output, row * width)
        return
    for i in range(count):
        factors = simd.splat(scratch.new_factors[first + i])
        for d in range(0, width, LANES):
            at, product = (row + i) * width + d, simd.load_words(scratch.products, i * width + d)
            simd.store(scratch.output, at, simd.fma(product, factors, simd.load(scratch.output, at)))


@inlined
def _multiply_keys(problem: Problem, row: int, count: int, first: int, scratch: Scratch) -> None:
    """Into the scores' rows from `first` on."""
    depth, tiled = scratch.depth, count // TILED_ROWS * TILED_ROWS if scratch.has_tiles else 0
    for i in range(0, tiled, TILED_ROWS):
        tiled_key_product(
            scratch.score_words, (first + i) * TILE, TILE, scratch.query_bytes, (row + i) * depth, depth,
            scratch.key_words, depth // WORD,
        )  # fmt: skip
    if tiled < count:
        key_product(
            count - tiled, scratch.score_words, (first + tiled) * TILE, TILE, scratch.query_starts, row + tiled, 1,
            scratch.query_bytes, (row + tiled) * depth, depth, scratch.key_words, -(-problem.layer.head_dim // WORD),
        )  # fmt: skip


@inlined
def _multiply_values(count: int, scratch: Scratch) -> None:
    width, tiled = scratch.width, 0
    if scratch.has_tiles and width >= TILED_COLUMNS * LANES:
        tiled = count // TILED_ROWS * TILED_ROWS
    for i in range(0, tiled, TILED_ROWS):
        tiled_value_product(
            width // LANES, scratch.products, i * width, width, scratch.weight_bytes, i * TILE, TILE,
            scratch.value_words, width * WORD, TILE // WORD,
        )  # fmt: skip
    if tiled < count:
        value_product(
            count - tiled, width // LANES, scratch.products, tiled * width, width, scratch.zero, scratch.weight_bytes,
            tiled * TILE, TILE, scratch.value_words, width * WORD, TILE // WORD,
        )  # fmt: skip


@inlined
def _seen(problem: Problem, row: int, begin: int, end: int, first_end: int) -> tuple[int, int]:
    """Of the span begin .. end, what a row attends to, counted from the tile's beginning."""
    start, row_end = begin // TILE * TILE, first_end + row // problem.group_size
    row_begin = max(begin, row_end - problem.window) if problem.window > 0 else begin
    return row_begin - start, min(end, row_end) - start


@inlined
def _score(scratch: Scratch, row: int, i: int, begin: int, end: int) -> None:
    """The scores' `row`: products times the keys' scales and, by lane, the largest; -Inf outside begin .. end."""
    at, scores, top = row * TILE, scratch.scores, simd.splat(_NONE_YET)
    for j in range(0, TILE, LANES):
        score = simd.multiply(simd.load_words(scratch.score_words, at + j), simd.load(scratch.key_scales, j))
        score = masks.keep_between(score, simd.splat(_NONE_YET), np.int32(begin - j), np.int32(end - j))
        simd.store(scores, at + j, score)
        top = simd.larger(score, top)
    simd.store(scratch.tops, i * LANES, top)


@inlined
def _bound(scratch: Scratch, row: int, count: int) -> None:
    """Bounds of the rows' scores. Lanes past `count` are other rows', and stay. An infinite bound spoils its row, as a
    NaN does."""
    factors, old = simd.load(scratch.query_factors, row), simd.load(scratch.peak, row)
    largest = simd.multiply(simd.largest_lanes(scratch.tops, 0), factors)
    # a unit in the last place more, so that no score is above it once rounded otherwise
    above = simd.fma(simd.magnitude(largest), simd.splat(_ULP), largest)
    steps = simd.round_up(simd.multiply(above, simd.splat(_DISTANCE_ONE)))
    bound = simd.multiply(steps, simd.splat(_ONE / _DISTANCE_ONE))
    limit = simd.add(old, simd.splat(_PEAK_MARGIN))
    new = masks.choose_where_less(limit, bound, simd.round_up(bound), old)
    new = masks.keep_between(new, old, np.int32(0), np.int32(count))
    factor = power_lanes(simd.subtract(bound, new))
    factor = masks.nan_unless_less(simd.magnitude(bound), simd.splat(_INFINITY), factor)
    simd.store(scratch.starts, 0, steps)
    simd.store(scratch.tile_factors, 0, factor)
    simd.store(scratch.tile_masses, 0, simd.multiply(factor, simd.splat(_MASS_UNIT)))
    simd.store(scratch.peak, row, new)
    moved = simd.subtract(new, old)
    if simd.largest_lane(masks.choose_where_less(moved, simd.splat(_INFINITY), moved, simd.splat(_ZERO))) > _ZERO:
        simd.store(scratch.old_factors, 0, integer_power_lanes(simd.subtract(old, new)))
        _rescale(scratch, row, count)


@inlined
def _rescale(scratch: Scratch, row: int, count: int) -> None:
    for i in range(count):
        factors, width = simd.splat(scratch.old_factors[i]), scratch.width
        mass = simd.multiply(simd.load(scratch.mass, (row + i) * LANES), factors)
        simd.store(scratch.mass, (row + i) * LANES, mass)
        for at in range((row + i) * width, (row + i + 1) * width, LANES):
            simd.store(scratch.output, at, simd.multiply(simd.load(scratch.output, at), factors))


@inlined
def _scale_weights(scratch: Scratch, begin: int, end: int) -> np.float32:
    """What weights of positions begin .. end are multiplied by, 0 elsewhere; returns the largest of their scales."""
    s0, s1 = _scales(scratch, 0, begin, end), _scales(scratch, LANES, begin, end)
    s2, s3 = _scales(scratch, 2 * LANES, begin, end), _scales(scratch, 3 * LANES, begin, end)
    largest = simd.largest_lane(simd.larger(simd.larger(s0, s1), simd.larger(s2, s3)))
    raising = simd.splat(_WEIGHT_MAX / largest)
    write_ratios(
        simd.multiply(s0, raising), simd.multiply(s1, raising), simd.multiply(s2, raising), simd.multiply(s3, raising),
        scratch.ratios,
    )  # fmt: skip
    return largest


@inlined
def _scales(scratch: Scratch, j: int, begin: int, end: int) -> Any:
    scales = simd.load(scratch.value_scales, j)
    return masks.keep_between(scales, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))


@inlined
def _weigh(scratch: Scratch, row: int, first: int, count: int) -> None:
    """Rows of scores from `first` on -> bytes, which weigh the values; adds to the masses from `row` on."""
    i, at = first % CHUNK_ROWS, first * TILE
    _weigh_rows(
        count, TILE, scratch.scores, at, scratch.query_slopes, row, scratch.starts, i, scratch.tile_masses, i,
        scratch.mass, row * LANES, scratch.weight_table, scratch.ratios, 0, scratch.weight_bytes, i * TILE,
    )  # fmt: skip
