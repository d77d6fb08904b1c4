"""Reads KV blocks into a worker's scratch, widened to fp32: keys by dimension, values by position.

Scales stay apart, to be applied to scores and weights. Nothing past the wanted positions reaches a result.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import inlined
from kernels.cpu.elementary import fp16_to_fp32
from kernels.cpu.plan import TILE
from kernels.cpu.problem import Layer, Problem, Scratch
from kernels.cpu.simd import LANES
from kernels.cpu.widening import WIDE, widen, widen_transposed


@inlined
def load_tile(problem: Problem, sequence: int, head: int, start: int, count: int, scratch: Scratch) -> None:
    """Positions start .. start + count. The rest of the tile's keys and scales is left over or stale."""
    layer, table = problem.layer, simd.ints32(problem.block_tables)
    done = 0
    while done < count:
        block = table[sequence * problem.table_width + (start + done) // layer.block_size]
        offset = (start + done) % layer.block_size
        run = min(layer.block_size - offset, count - done)
        at = block * layer.block_stride + head * layer.head_stride + offset * layer.position_stride
        if layer.k_scale == 0:
            _load_keys(layer, simd.floats(layer.k), at, 0, done, run, scratch)
            _load_values(layer, simd.floats(layer.v), at, done, run, scratch)
        else:
            wide = _load_wide_keys(layer, at, done, run, scratch)
            _load_keys(layer, simd.bytes_signed(layer.k), at, wide, done, run, scratch)
            _load_values(layer, simd.bytes_signed(layer.v), at, done, run, scratch)
            _load_scales(layer, block, head, offset, done, run, scratch)
        done += run


@inlined
def _load_wide_keys(layer: Layer, at: int, done: int, run: int, scratch: Scratch) -> int:
    """As `_load_keys`, for as many leading dimensions as can be shuffled; returns their number."""
    if layer.block_size % LANES != 0:
        return 0  # a group of positions may cross into another block
    wide, k, stride = layer.head_dim // WIDE * WIDE, simd.bytes_signed(layer.k), layer.position_stride
    for d in range(0, wide, WIDE):
        for j in range(0, run, LANES):  # past `run` a group reads stale positions of the same block
            widen_transposed(k, at + j * stride + d, stride, scratch.keys, d * TILE + done + j, TILE)
    return wide


@inlined
def _load_keys(layer: Layer, k: Any, at: int, first_dim: int, done: int, run: int, scratch: Scratch) -> None:
    """Keys of `run` positions of one block, to positions done .. done + run of the tile."""
    for j in range(run):
        for d in range(first_dim, layer.head_dim):
            scratch.keys[d * TILE + done + j] = np.float32(k[at + j * layer.position_stride + d])


@inlined
def _load_values(layer: Layer, v: Any, at: int, done: int, run: int, scratch: Scratch) -> None:
    whole = layer.head_dim // LANES * LANES
    for j in range(run):
        source, target = at + j * layer.position_stride, (done + j) * scratch.width
        for d in range(0, whole, LANES):
            widen(v, source + d, scratch.values, target + d)
        for d in range(whole, layer.head_dim):
            scratch.values[target + d] = np.float32(v[source + d])


@inlined
def _load_scales(layer: Layer, block: int, head: int, offset: int, done: int, run: int, scratch: Scratch) -> None:
    k_scale, v_scale = simd.halves(layer.k_scale), simd.halves(layer.v_scale)
    at = block * layer.scale_block_stride + head * layer.scale_head_stride
    for j in range(run):
        source = at + (offset + j) * layer.scale_position_stride
        scratch.key_scales[done + j] = fp16_to_fp32(k_scale[source])
        scratch.value_scales[done + j] = fp16_to_fp32(v_scale[source])
