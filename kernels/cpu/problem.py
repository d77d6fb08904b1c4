"""What an attention task is given: the problem, and a worker's own memory."""

from typing import Any, NamedTuple

import numba
import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import compiled
from kernels.cpu.plan import TILE, unit_rows
from kernels.cpu.products import MAX_ROWS
from kernels.cpu.simd import LANES


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


class Scratch(NamedTuple):
    """Pointers into one worker's memory, fp32. Per row: peak, the largest score so far; mass, the sum of exponentials
    relative to it (by lane within a partition); output, the weighted sum of values."""

    queries: Any  # [rows, head_dim], times the softmax scale
    keys: Any  # [head_dim, TILE]
    values: Any  # [TILE, width]
    key_scales: Any  # [TILE]
    value_scales: Any  # [TILE]
    scores: Any  # [MAX_ROWS, TILE]; then the weights of the values
    peak: Any  # [rows]
    mass: Any  # [rows, LANES]
    output: Any  # [rows, width]
    total_peak: Any  # [rows]
    total_mass: Any  # [rows]
    total_output: Any  # [rows, width]
    width: int  # head_dim rounded up to whole lanes


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
def scratch_size(problem: Problem) -> int:
    """Elements of one worker's memory."""
    rows, width = unit_rows(problem.group_size), row_width(problem)
    return rows * (problem.layer.head_dim + 2 * width + LANES + 3) + TILE * (
        problem.layer.head_dim + width + 2 + MAX_ROWS
    )


@compiled
def scratch_at(problem: Problem, address: int) -> Scratch:
    """A worker's memory [scratch_size], cleared by `lay_out_scratch` before its first use."""
    rows, width, head_dim = unit_rows(problem.group_size), row_width(problem), problem.layer.head_dim
    keys = address + 4 * rows * head_dim
    values = keys + 4 * TILE * head_dim
    key_scales = values + 4 * TILE * width
    scores = key_scales + 4 * TILE * 2
    peak = scores + 4 * TILE * MAX_ROWS
    mass = peak + 4 * rows * 3
    output = mass + 4 * rows * LANES
    return Scratch(
        queries=simd.floats(address),
        keys=simd.floats(keys),
        values=simd.floats(values),
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
    )


@compiled
def lay_out_scratch(problem: Problem, address: int) -> Scratch:
    """As `scratch_at`; initializes what is read before it is written: lanes of padding, and what a partial tile
    leaves of keys and scales."""
    scratch = scratch_at(problem, address)
    for i in range(TILE * (problem.layer.head_dim + scratch.width)):
        scratch.keys[i] = np.float32(0.0)
    for i in range(2 * TILE):
        scratch.key_scales[i] = np.float32(1.0)
    return scratch
