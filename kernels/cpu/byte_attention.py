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
from kernels.cpu.byte_products import key_product, value_product
from kernels.cpu.byte_tiles import WORD, load_byte_tile
from kernels.cpu.compiling import compiled, inlined
from kernels.cpu.elementary import INFINITY_BITS, exp2_fp32, exp2_lanes, largest_magnitude_bits
from kernels.cpu.interleaving import split_bytes
from kernels.cpu.plan import KV_HEAD, NUM_QUERIES, PARTITION, SEQUENCE, TILE
from kernels.cpu.problem import CHUNK_ROWS, Problem, Scratch
from kernels.cpu.simd import LANES

MAX_HEAD_DIM = 1024
"""Beyond, a product may leave int32: 1024 * 127 * 16256 < 2^31, as is 64 * 127 * 65535 for values."""
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
_HALF_STEP = np.int32(1 << 7)  # of a 16-bit weight, in the last places of its 24-bit mantissa
_MIN_EXPONENT = np.int32(16)  # so that 2^n is finite


@inlined
def quantize_query(problem: Problem, queries: int, row: int, scratch: Scratch) -> None:
    """The fp32 query at address `queries` becomes the scratch's `row`; one with a NaN or Inf gets a factor of NaN."""
    source, head_dim, width = simd.floats(queries), problem.layer.head_dim, scratch.width
    largest = np.int32(largest_magnitude_bits(source, head_dim)).view(np.float32) * problem.scale
    is_bad = not largest < np.inf
    largest = max(largest, _QUERY_FLOOR)
    inverse, at, total = _QUERY_MAX / largest, row * 2 * width, np.int32(0)
    for d in range(width):
        scratch.query_bytes[at + d], scratch.query_bytes[at + width + d] = np.int8(0), np.int8(0)
    if is_bad:
        scratch.query_factors[row] = np.float32(np.nan)
    else:
        scratch.query_factors[row] = largest / _QUERY_MAX * _LOG2_E
        for d in range(head_dim):
            scaled = np.float32(source[d] * problem.scale) * inverse
            value = np.int32(np.float32(scaled + _ROUNDER).view(np.int32) - _ROUNDER_BITS)
            high = np.int32(value + np.int32(64)) >> np.int32(7)
            scratch.query_bytes[at + d] = np.int8(high)
            scratch.query_bytes[at + width + d] = np.int8(value - (high << np.int32(7)))
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
    head_dim, width = problem.layer.head_dim, scratch.width
    key_product(
        count, scratch.products, 0, TILE, scratch.query_starts, row, scratch.query_bytes, row * 2 * width, 2 * width,
        width, scratch.key_words, -(-head_dim // WORD),
    )  # fmt: skip
    for i in range(count):
        begin, end = 0, TILE
        if not is_whole:
            visible_end = first_end + (row + i) // problem.group_size
            end = min(TILE, visible_end - start)
            begin = max(0, visible_end - problem.window - start) if problem.window > 0 else 0
        _weigh(scratch, row + i, i, begin, end)
    value_product(
        count, width // LANES, scratch.products, 0, width, scratch.zeros, scratch.weight_bytes, 0, 2 * TILE, TILE,
        scratch.value_words, 0, width * WORD, TILE // WORD,
    )  # fmt: skip
    for i in range(count):
        olds, news = simd.splat(scratch.old_factors[i]), simd.splat(scratch.new_factors[i])
        for d in range(0, width, LANES):
            at = (row + i) * width + d
            old = simd.multiply(simd.load(scratch.output, at), olds)
            simd.store(scratch.output, at, simd.fma(simd.load_words(scratch.products, i * width + d), news, old))


@compiled
def _weigh(scratch: Scratch, row: int, i: int, begin: int, end: int) -> None:
    """Products of the chunk's row `i` -> bytes of weights; the row's peak and mass move to the new peak.

    Only positions begin .. end of the tile count.
    """
    at, scores = i * TILE, scratch.scores
    is_whole = begin == 0 and end == TILE
    factor, top = simd.splat(scratch.query_factors[row]), simd.splat(_NONE_YET)
    for j in range(0, TILE, LANES):
        product = simd.multiply(simd.load_words(scratch.products, at + j), simd.load(scratch.key_scales, j))
        score = simd.multiply(product, factor)
        if not is_whole:
            score = simd.keep_between(score, simd.splat(_NONE_YET), np.int32(begin - j), np.int32(end - j))
        simd.store(scores, at + j, score)
        top = simd.larger(score, top)
    tile_peak, old_factor = simd.largest_lane(top), _ONE
    mass = simd.load(scratch.mass, row * LANES)
    if tile_peak > scratch.peak[row]:
        # a score too large for fp32 spoils its row, as a query that is not finite does
        old_factor = exp2_fp32(scratch.peak[row] - tile_peak) if tile_peak < np.inf else np.float32(np.nan)
        scratch.peak[row] = tile_peak
        mass = simd.multiply(mass, simd.splat(old_factor))
    peak, top = simd.splat(scratch.peak[row]), simd.splat(_ZERO)
    for j in range(0, TILE, LANES):
        weight = exp2_lanes(simd.subtract(simd.load(scores, at + j), peak))
        weighted = simd.multiply(weight, simd.load(scratch.value_scales, j))
        if not is_whole:
            weight = simd.keep_between(weight, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))
            weighted = simd.keep_between(weighted, simd.splat(_ZERO), np.int32(begin - j), np.int32(end - j))
        mass = simd.add(mass, weight)
        simd.store(scores, at + j, weighted)
        top = simd.larger(weighted, top)
    simd.store(scratch.mass, row * LANES, mass)
    exponent = (np.float32(simd.largest_lane(top)).view(np.int32) + _HALF_STEP) >> np.int32(23)
    exponent = max(np.int32(exponent), _MIN_EXPONENT)
    raised = simd.splat(np.int32((np.int32(269) - exponent) << np.int32(23)).view(np.float32))  # 2^15 / its power
    for j in range(0, TILE, LANES):
        weighted = simd.load(scores, at + j)
        simd.store(scores, at + j, simd.fma(weighted, raised, simd.splat(_WEIGHT_ROUNDER)))
    split_bytes(scratch.products, at, scratch.weight_bytes, i * 2 * TILE, TILE)
    scratch.old_factors[i] = old_factor
    scratch.new_factors[i] = np.int32((exponent - np.int32(15)) << np.int32(23)).view(np.float32)
