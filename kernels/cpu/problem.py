"""What an attention task is given: the problem, and a worker's own memory."""

from typing import Any, NamedTuple

import numba
import numpy as np

from kernels.cpu import simd
from kernels.cpu.amx import TILE_BYTES
from kernels.cpu.byte_amx import tiles_are_granted
from kernels.cpu.compiling import compiled
from kernels.cpu.plan import TILE, unit_rows
from kernels.cpu.products import MAX_ROWS
from kernels.cpu.simd import LANES
from kernels.cpu.weights import POWERS

CHUNK_ROWS = 16
"""Query rows of an INT8 layer whose scores are held at once."""
_LINE = 16  # elements in a cache line


class Layer(NamedTuple):
    """One layer of a KV pool. Memory is named by address; strides are in elements of their array."""

    k: int  # int8, or fp32 where k_scale is 0
    v: int
    block_stride: int
    head_stride: int
    position_stride: int
    k_scale: int  # fp16; 0: none
    v_scale: int
    scale_block_stride: int
    scale_head_stride: int
    scale_position_stride: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


class Problem(NamedTuple):
    """One call of paged attention. Memory is named by address."""

    layer: Layer
    scale: Any  # fp32
    queries: int  # [T, num_kv_heads, group_size, head_dim] fp32
    output: int  # the same
    group_size: int
    window: int
    query_start: int  # [num_sequences + 1] int32
    context_lens: int  # [num_sequences] int32
    block_tables: int  # [num_sequences, table_width] int32
    table_width: int
    num_sequences: int


# Entry points take plain tuples of integers, which are quicker to pass, and build these from them.
LAYER_FIELDS = numba.types.UniTuple(numba.types.int64, len(Layer._fields))
PROBLEM_FIELDS = numba.types.UniTuple(numba.types.int64, len(Problem._fields) - 2)


@compiled
def flat_fields(layer: Any, scale: Any, fields: Any) -> Any:
    """What `read_problem` reads: the layer's fields, the bits of the scale, and the others in their order."""
    bits = np.int64(np.float32(scale).view(np.int32))
    return (
        layer[0], layer[1], layer[2], layer[3], layer[4], layer[5], layer[6], layer[7], layer[8], layer[9], layer[10],
        layer[11], layer[12], layer[13], bits, fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
        fields[6], fields[7], fields[8],
    )  # fmt: skip


@compiled
def read_problem(address: int) -> Problem:
    """From the address of `flat_fields`."""
    f = simd.ints64(address)
    layer = Layer(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13])
    scale = np.int32(f[14]).view(np.float32)
    return Problem(layer, scale, f[15], f[16], f[17], f[18], f[19], f[20], f[21], f[22], f[23])


class Scratch(NamedTuple):
    """Pointers into one worker's memory, fp32 unless said otherwise. Per row: peak, the largest score so far; mass, the
    sum of exponentials relative to it (by lane within a partition); output, the weighted sum of values. An unquantized
    layer's scores are in natural units, an INT8 layer's in binary ones, and its outputs' columns in `byte_tiles`'
    order."""

    key_scales: Any  # [TILE]
    value_scales: Any  # [TILE]
    scores: Any  # [chunk, TILE]; then the weights of the values. Of an INT8 layer [2, chunk, TILE]
    peak: Any  # [rows]
    mass: Any  # [rows, LANES]
    output: Any  # [rows, width]
    total_peak: Any  # [rows]
    total_mass: Any  # [rows]
    total_output: Any  # [rows, width]
    width: int  # head_dim rounded up to whole lanes
    # of an unquantized layer
    queries: Any  # [rows, head_dim], times the softmax scale
    keys: Any  # [head_dim, TILE]
    values: Any  # [TILE, width]
    # of an INT8 layer; `kernels.cpu.byte_attention` says what they mean
    has_tiles: bool  # AMX's
    depth: int  # head_dim rounded up to what an AMX tile holds of a row
    query_bytes: Any  # [rows, depth] int8
    query_starts: Any  # [rows] int32
    query_factors: Any  # [rows]
    query_slopes: Any  # [rows]
    key_words: Any  # [depth / 4, TILE, 4] int8
    value_words: Any  # [TILE / 4, width, 4] int8
    weight_bytes: Any  # [chunk, TILE] uint8
    score_words: Any  # [2, chunk, TILE] int32: what scores are made of, in their memory
    products: Any  # [chunk, width] int32
    tops: Any  # [chunk, LANES]
    old_factors: Any  # [chunk]
    new_factors: Any  # [2, chunk]
    tile_factors: Any  # [chunk]
    tile_masses: Any  # [chunk]
    starts: Any  # [chunk]
    ratios: Any  # [TILE] uint16
    weight_table: Any  # [2, 32] uint16
    value_scale_tops: Any  # [1]
    zero: Any  # [1] int32


@compiled
def row_width(problem: Problem) -> int:
    return -(-problem.layer.head_dim // LANES) * LANES


@compiled
def slot_pointers(address: int, rows: int) -> Any:
    """Peaks, masses and outputs of `rows` rows of split units' partial results."""
    masses = address + 4 * rows
    return simd.floats(address), simd.floats(masses), simd.floats(masses + 4 * rows * LANES)


@compiled
def slot_size(problem: Problem) -> int:
    """Elements of one slot."""
    return unit_rows(problem.group_size) * (1 + LANES + row_width(problem))


@compiled
def _row_depth(problem: Problem) -> int:
    return -(-problem.layer.head_dim // TILE_BYTES) * TILE_BYTES


@compiled
def scratch_size(problem: Problem) -> int:
    """Elements of one worker's memory."""
    rows, width = unit_rows(problem.group_size), row_width(problem)
    either = rows * (2 * width + LANES + 3) + 2 * TILE
    if problem.layer.k_scale == 0:
        return 2 * _LINE + either + rows * problem.layer.head_dim + TILE * (problem.layer.head_dim + width + MAX_ROWS)
    chunk = CHUNK_ROWS * (2 * TILE + width + TILE // 4 + LANES + 6)
    depth = _row_depth(problem)
    own = TILE // 2 + 2 * LANES + rows * (depth // 4 + 3) + TILE // 4 * (depth + width) + chunk + 2
    return 2 * _LINE + either + own


@compiled
def scratch_at(problem: Problem, address: int) -> Scratch:
    """A worker's memory [scratch_size], cleared by `lay_out_scratch` before its first use."""
    rows, width, head_dim = unit_rows(problem.group_size), row_width(problem), problem.layer.head_dim
    depth, is_plain = _row_depth(problem), problem.layer.k_scale == 0
    line = -(-address // (4 * _LINE)) * 4 * _LINE
    # first what whole vectors are read from, so that each lies in one cache line
    output = line + 4 * _LINE  # the line before says whether there are tiles
    mass = output + 4 * 2 * rows * width
    key_scales = mass + 4 * rows * LANES
    scores = key_scales + 4 * 2 * TILE + (0 if is_plain else 2 * TILE + 4 * 2 * LANES)
    products = scores + 4 * TILE * (MAX_ROWS if is_plain else 2 * CHUNK_ROWS)
    tops = products + (0 if is_plain else 4 * CHUNK_ROWS * width)
    keys = tops + (0 if is_plain else 4 * CHUNK_ROWS * LANES)
    values = keys + (4 * head_dim if is_plain else depth) * TILE
    queries = values + (4 if is_plain else 1) * width * TILE
    weights = queries + (4 * rows * head_dim if is_plain else rows * depth)
    starts = weights + (0 if is_plain else CHUNK_ROWS * TILE)
    peak = starts + (0 if is_plain else 4 * rows)
    factors = peak + 4 * rows * 3
    chunk_factors = factors + 4 * 2 * rows
    return Scratch(
        key_scales=simd.floats(key_scales),
        value_scales=simd.floats(key_scales + 4 * TILE),
        scores=simd.floats(scores),
        peak=simd.floats(peak),
        mass=simd.floats(mass),
        output=simd.floats(output),
        total_peak=simd.floats(peak + 4 * rows),
        total_mass=simd.floats(peak + 4 * 2 * rows),
        total_output=simd.floats(output + 4 * rows * width),
        width=width,
        queries=simd.floats(queries),
        keys=simd.floats(keys),
        values=simd.floats(values),
        has_tiles=simd.ints32(line)[0] != 0,
        depth=depth,
        query_bytes=simd.bytes_signed(queries),
        query_starts=simd.ints32(starts),
        query_factors=simd.floats(factors),
        query_slopes=simd.floats(factors + 4 * rows),
        key_words=simd.bytes_signed(keys),
        value_words=simd.bytes_signed(values),
        weight_bytes=simd.bytes_unsigned(weights),
        score_words=simd.ints32(scores),
        products=simd.ints32(products),
        tops=simd.floats(tops),
        old_factors=simd.floats(chunk_factors),
        new_factors=simd.floats(chunk_factors + 4 * CHUNK_ROWS),
        tile_factors=simd.floats(chunk_factors + 4 * 3 * CHUNK_ROWS),
        tile_masses=simd.floats(chunk_factors + 4 * 4 * CHUNK_ROWS),
        starts=simd.floats(chunk_factors + 4 * 5 * CHUNK_ROWS),
        ratios=simd.halves(key_scales + 4 * 2 * TILE),
        weight_table=simd.halves(key_scales + 4 * 2 * TILE + 2 * TILE),
        value_scale_tops=simd.floats(chunk_factors + 4 * 6 * CHUNK_ROWS),
        zero=simd.ints32(chunk_factors + 4 * (6 * CHUNK_ROWS + 1)),
    )


@compiled
def lay_out_scratch(problem: Problem, address: int) -> Scratch:
    """As `scratch_at`; initializes what is read before it is written: lanes of padding, what a partial tile leaves of
    keys and scales, and whether there are tiles."""
    line = -(-address // (4 * _LINE)) * 4 * _LINE
    simd.ints32(line)[0] = np.int32(tiles_are_granted())
    scratch = scratch_at(problem, address)
    if problem.layer.k_scale == 0:
        for i in range(TILE * problem.layer.head_dim):
            scratch.keys[i] = np.float32(0.0)
        for i in range(TILE * scratch.width):
            scratch.values[i] = np.float32(0.0)
    else:
        scratch.zero[0] = np.int32(0)
        for i in range(2 * LANES):
            scratch.weight_table[i], scratch.weight_table[2 * LANES + i] = np.uint16(POWERS[i]), np.uint16(1)
    for i in range(TILE):
        scratch.key_scales[i] = np.float32(1.0)
        scratch.value_scales[i] = np.float32(1.0)
    return scratch
