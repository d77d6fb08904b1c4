"""Reads INT8 blocks into a worker's scratch, as words of four bytes that one step of a dot product takes.

Keys: of one position, four dimensions. Values: of one dimension, four positions, in the
order in which weights are packed. Scales stay apart. Nothing past the wanted positions reaches a result: their scores
are masked, and their weights are zeros.
"""

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, inlined
from kernels.cpu.elementary import fp16_lanes, fp16_to_fp32
from kernels.cpu.interleaving import CHUNK, WIDE, interleave_keys, interleave_values, interleave_wide_values
from kernels.cpu.plan import TILE
from kernels.cpu.problem import Layer, Problem, Scratch
from kernels.cpu.simd import LANES

WORD = 4  # bytes that are multiplied and summed at once
_CACHE_LINE = 64


@compiled
def column(dimension: int, head_dim: int) -> int:
    """Where a dimension of the values, and so of the outputs, lies: within each whole 64 dimensions, bits 4 and 5 of
    its number are exchanged with bits 2 and 3, as the cheapest shuffles leave them."""
    if dimension >= head_dim // WIDE * WIDE:
        return dimension
    within = dimension % WIDE
    return dimension - within + within // 4 % 4 * 16 + within // 16 * 4 + within % 4


@compiled
def value_row(position: int) -> int:
    """Where the words of a position's group of four lie: first the first groups of each sixteen positions, as
    `weights.weigh_row` leaves the weights."""
    return position % LANES // WORD * (TILE // LANES) + position // LANES


@compiled
def fetch_byte_tile(problem: Problem, sequence: int, head: int, start: int, end: int) -> None:
    """Asks for the bytes of positions start .. end, if the sequence has them: blocks lie far apart, and each is too
    short for the processor to see by itself what is read next."""
    layer, table = problem.layer, simd.ints32(problem.block_tables)
    size = layer.block_size * layer.position_stride
    for index in range(start // layer.block_size, -(-end // layer.block_size)):
        block = table[sequence * problem.table_width + index]
        at = block * layer.block_stride + head * layer.head_stride
        for byte in range(0, size, _CACHE_LINE):
            simd.fetch_line(layer.k + at + byte)
            simd.fetch_line(layer.v + at + byte)
        scales = 2 * (block * layer.scale_block_stride + head * layer.scale_head_stride)
        simd.fetch_line(layer.k_scale + scales)
        simd.fetch_line(layer.v_scale + scales)


@inlined
def load_byte_tile(problem: Problem, sequence: int, head: int, start: int, count: int, scratch: Scratch) -> None:
    """Positions start .. start + count. The rest of the tile's bytes is left over or stale."""
    layer, table = problem.layer, simd.ints32(problem.block_tables)
    done = 0
    while done < count:
        block = table[sequence * problem.table_width + (start + done) // layer.block_size]
        offset = (start + done) % layer.block_size
        run = min(layer.block_size - offset, count - done)
        at = block * layer.block_stride + head * layer.head_stride + offset * layer.position_stride
        # else a group of positions may cross into another block; in here, past `run` a group reads stale positions
        shuffled = layer.head_dim // CHUNK * CHUNK if layer.block_size % LANES == 0 else 0
        if shuffled > 0:
            _shuffle_keys(layer, at, done, run, scratch)
            _shuffle_values(layer, at, done, run, scratch)
        for j in range(run):
            for d in range(shuffled, layer.head_dim):
                _place(layer, at + j * layer.position_stride + d, done + j, d, scratch)
        _load_scales(layer, block, head, offset, done, run, scratch)
        done += run


@inlined
def _shuffle_keys(layer: Layer, at: int, done: int, run: int, scratch: Scratch) -> None:
    keys, stride = simd.bytes_signed(layer.k), layer.position_stride
    for j in range(0, run, LANES):
        for d in range(0, layer.head_dim // CHUNK * CHUNK, CHUNK):
            target = d * TILE + (done + j) * WORD
            interleave_keys(keys, at + j * stride + d, stride, scratch.key_words, target, TILE * WORD)


@inlined
def _shuffle_values(layer: Layer, at: int, done: int, run: int, scratch: Scratch) -> None:
    values, stride = simd.bytes_signed(layer.v), layer.position_stride
    wide = layer.head_dim // WIDE * WIDE
    for j in range(0, run, WORD):
        source, target = at + j * stride, value_row(done + j) * scratch.width * WORD
        for d in range(0, wide, WIDE):
            interleave_wide_values(values, source + d, stride, scratch.value_words, target + d * WORD)
        for d in range(wide, layer.head_dim // CHUNK * CHUNK, CHUNK):
            interleave_values(values, source + d, stride, scratch.value_words, target + d * WORD)


@inlined
def _place(layer: Layer, source: int, position: int, dimension: int, scratch: Scratch) -> None:
    """One dimension of one position of a tile."""
    key_at = dimension // WORD * TILE * WORD + position * WORD + dimension % WORD
    scratch.key_words[key_at] = simd.bytes_signed(layer.k)[source]
    value_at = value_row(position) * scratch.width * WORD + column(dimension, layer.head_dim) * WORD + position % WORD
    scratch.value_words[value_at] = simd.bytes_signed(layer.v)[source]


@inlined
def _load_scales(layer: Layer, block: int, head: int, offset: int, done: int, run: int, scratch: Scratch) -> None:
    k_scale, v_scale = simd.halves(layer.k_scale), simd.halves(layer.v_scale)
    at = block * layer.scale_block_stride + head * layer.scale_head_stride + offset * layer.scale_position_stride
    whole = run // LANES * LANES if layer.scale_position_stride == 1 else 0
    for j in range(0, whole, LANES):
        simd.store(scratch.key_scales, done + j, fp16_lanes(k_scale, at + j))
        simd.store(scratch.value_scales, done + j, fp16_lanes(v_scale, at + j))
    for j in range(whole, run):
        source = at + j * layer.scale_position_stride
        scratch.key_scales[done + j] = fp16_to_fp32(k_scale[source])
        scratch.value_scales[done + j] = fp16_to_fp32(v_scale[source])
