"""One partition of attention over INT8 keys and values: products exact in integers, the rest a fixed chain per row.

Queries, times the softmax scale: Q = rint(q * 127 / largest |q|), int8. A score is a * factor;
a = fp32(Q . K) * k_scale, factor = largest |q| / 127 * log2(e), so that weights are powers of two. The bound is the
least integer that is no smaller than its largest score, and w = 2^(score - bound). The values' weights are
W = rint(w * v_scale * 255 / largest v_scale), uint8, the largest being of the positions that the row sees. The peak is
the largest bound so far; output = fma(fp32(W . V), largest v_scale / 255 * 2^(bound - peak), output * 2^(old peak -
peak)), and masses, sums of w by lane, move to a new peak in the same way. Masked positions have w = 0. A row's tile so
depends on nothing but the row and what it sees: neither on other rows nor on the order of sums within a product.
"""

from typing import Any

import numpy as np

from kernels.cpu import masks, simd
from kernels.cpu.byte_amx import TILED_COLUMNS, TILED_ROWS, tiled_key_product, tiled_value_product
from kernels.cpu.byte_products import key_product, value_product
from kernels.cpu.byte_tiles import WORD, fetch_byte_tile, load_byte_tile
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import exp2_lanes, largest_magnitude_bits, weight_lanes
from kernels.cpu.interleaving import pack_bytes
from kernels.cpu.plan import KV_HEAD, NUM_QUERIES, PARTITION, SEQUENCE, TILE
from kernels.cpu.problem import CHUNK_ROWS, Problem, Scratch
from kernels.cpu.simd import LANES

QUERY_MAX = 127

_ZERO = np.float32(0.0)
_NONE_YET = np.float32(-np.inf)
_QUERY_MAX = np.float32(QUERY_MAX)
_QUERY_FLOOR = np.float32(2.0**-100)  # of the largest |q|, so that its inverse is finite
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer, ties to even, in the low bits
_ROUNDER_BITS = np.int32(_ROUNDER.view(np.int32))
_WEIGHT_ROUNDER = np.float32(1 << 23)  # the same for integers that are not negative
_WEIGHT_MAX = np.float32(255.0)
_LEAST = np.float32((3 << 22) - 64)  # 2^-64 of a tile's largest weight: less counts as 0
_BOUND_END = np.float32(1 << 22)  # of integers that _ROUNDER can hold beside a difference


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
    else:
        scratch.query_factors[row] = largest / _QUERY_MAX * _LOG2_E
        for d in range(head_dim):
            scaled = np.float32(source[d] * problem.scale) * inverse
            value = np.int32(np.float32(scaled + _ROUNDER).view(np.int32) - _ROUNDER_BITS)
            scratch.query_bytes[at + d] = np.int8(value)
            total += value
    for lane in range(LANES):
        scratch.query_starts[row * LANES + lane] = total * np.int32(-128)  # keys are 128 higher than they should be


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
            if is_whole:
                scratch.value_scale_tops[0] = _scale_weights(scratch, 0, TILE)
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
        _score(scratch, i, begin, end)
    _raise_peaks(scratch, row, count)
    for i in range(count):
        top = scratch.value_scale_tops[0]
        if not is_whole:
            begin, end = _seen(problem, row + i, start, first_end, is_whole)
            top = _scale_weights(scratch, begin, end)
        scratch.new_factors[i] = scratch.tile_factors[i] * (top / _WEIGHT_MAX)
        _weigh(scratch, row + i, i)
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
            scratch.products, i * TILE, TILE, scratch.query_starts, (row + i) * LANES, scratch.query_bytes,
            (row + i) * depth, depth, scratch.key_words, depth // WORD,
        )  # fmt: skip
    if tiled < count:
        key_product(
            count - tiled, scratch.products, tiled * TILE, TILE, scratch.query_starts, (row + tiled) * LANES, LANES,
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
def _seen(problem: Problem, row: int, start: int, first_end: int, is_whole: bool) -> tuple[int, int]:
    """Positions begin .. end of the tile at `start` that a row attends to."""
    if is_whole:
        return 0, TILE
    end = first_end + row // problem.group_size - start
    return (max(0, end - problem.window) if problem.window > 0 else 0), min(TILE, end)


@inlined
def _score(scratch: Scratch, i: int, begin: int, end: int) -> None:
    """Products of the chunk's row `i`, times the keys' scales and, by lane, the largest; -Inf outside begin .. end."""
    at, scores, top = i * TILE, scratch.scores, simd.splat(_NONE_YET)
    for j in range(0, TILE, LANES):
        score = simd.multiply(simd.load_words(scratch.products, at + j), simd.load(scratch.key_scales, j))
        if begin > 0 or end < TILE:
            score = masks.keep_between(score, simd.splat(_NONE_YET), np.int32(begin - j), np.int32(end - j))
        simd.store(scores, at + j, score)
        top = simd.larger(score, top)
    simd.store(scratch.tops, i * LANES, top)


@inlined
def _raise_peaks(scratch: Scratch, row: int, count: int) -> None:
    """Sixteen rows at a time; lanes past `count` are other rows', and stay. A bound that is too large for exact
    differences spoils its row, as a NaN does."""
    for i in range(0, count, LANES):
        factors, old = simd.load(scratch.query_factors, row + i), simd.load(scratch.peak, row + i)
        bound = simd.round_up(simd.multiply(simd.largest_lanes(scratch.tops, i * LANES), factors))
        new = simd.larger(old, bound)
        factor = exp2_lanes(simd.subtract(bound, new))
        factor = masks.nan_unless_less(simd.magnitude(bound), simd.splat(_BOUND_END), factor)
        simd.store(scratch.offsets, i, simd.subtract(simd.splat(_ROUNDER), bound))
        simd.store(scratch.old_factors, i, exp2_lanes(simd.subtract(old, new)))
        simd.store(scratch.tile_factors, i, factor)
        simd.store(scratch.peak, row + i, masks.keep_between(new, old, np.int32(0), np.int32(count - i)))


@inlined
def _scale_weights(scratch: Scratch, begin: int, end: int) -> np.float32:
    """What weights of positions begin .. end are multiplied by, 0 elsewhere; returns the largest of their scales."""
    top = simd.splat(_ZERO)
    for j in range(0, TILE, LANES):
        scales = simd.load(scratch.value_scales, j)
        scales = masks.keep_between(scales, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))
        simd.store(scratch.weight_scales, j, scales)
        top = simd.larger(scales, top)
    largest = simd.largest_lane(top)
    raising = simd.splat(_WEIGHT_MAX / largest)
    for j in range(0, TILE, LANES):
        simd.store(scratch.weight_scales, j, simd.multiply(simd.load(scratch.weight_scales, j), raising))
    return largest


@inlined
def _weigh(scratch: Scratch, row: int, i: int) -> None:
    """Scores of the chunk's row `i` -> bytes, which weigh the values; adds to the mass."""
    at = i * TILE
    factor, offset = simd.splat(scratch.query_factors[row]), simd.splat(scratch.offsets[i])
    w0, b0 = _weights(scratch, at, 0, factor, offset)
    w1, b1 = _weights(scratch, at, LANES, factor, offset)
    w2, b2 = _weights(scratch, at, 2 * LANES, factor, offset)
    w3, b3 = _weights(scratch, at, 3 * LANES, factor, offset)
    pack_bytes(b0, b1, b2, b3, scratch.weight_bytes, at)
    sums = simd.add(simd.add(w0, w1), simd.add(w2, w3))
    mass = simd.multiply(simd.load(scratch.mass, row * LANES), simd.splat(scratch.old_factors[i]))
    simd.store(scratch.mass, row * LANES, simd.fma(sums, simd.splat(scratch.tile_factors[i]), mass))


@inlined
def _weights(scratch: Scratch, at: int, j: int, factor: Any, offset: Any) -> Any:
    """Sixteen positions' w, and W in the low bits."""
    score = simd.load(scratch.scores, at + j)
    shifted = simd.fma(score, factor, offset)  # the nearest integer to the difference from the bound, and _ROUNDER
    remainder = simd.fma(score, factor, simd.subtract(offset, shifted))
    weight = weight_lanes(remainder, shifted, simd.splat(_LEAST))
    return weight, simd.fma(weight, simd.load(scratch.weight_scales, j), simd.splat(_WEIGHT_ROUNDER))
