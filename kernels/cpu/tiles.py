"""Reads unquantized KV blocks into a worker's scratch: keys by dimension, values by position.

Nothing past the wanted positions reaches a result.
"""

from typing import Any

from kernels.cpu import simd
from kernels.cpu.compiling import inlined
from kernels.cpu.plan import TILE
from kernels.cpu.problem import Layer, Problem, Scratch
from kernels.cpu.simd import LANES


@inlined
def load_tile(problem: Problem, sequence: int, head: int, start: int, count: int, scratch: Scratch) -> None:
    """Positions start .. start + count. The rest of the tile's keys is left over or stale."""
    layer, table = problem.layer, simd.ints32(problem.block_tables)
    done = 0
    while done < count:
        block = table[sequence * problem.table_width + (start + done) // layer.block_size]
        offset = (start + done) % layer.block_size
        run = min(layer.block_size - offset, count - done)
        at = block * layer.block_stride + head * layer.head_stride + offset * layer.position_stride
        _load_keys(layer, simd.floats(layer.k), at, done, run, scratch)
        _load_values(layer, simd.floats(layer.v), at, done, run, scratch)
        done += run


@inlined
def _load_keys(layer: Layer, k: Any, at: int, done: int, run: int, scratch: Scratch) -> None:
    """Keys of `run` positions of one block, to positions done .. done + run of the tile."""
    for j in range(run):
        for d in range(layer.head_dim):
            scratch.keys[d * TILE + done + j] = k[at + j * layer.position_stride + d]


@inlined
def _load_values(layer: Layer, v: Any, at: int, done: int, run: int, scratch: Scratch) -> None:
    whole = layer.head_dim // LANES * LANES
    for j in range(run):
        source, target = at + j * layer.position_stride, (done + j) * scratch.width
        for d in range(0, whole, LANES):
            simd.store(scratch.values, target + d, simd.load(v, source + d))
        for d in range(whole, layer.head_dim):
            scratch.values[target + d] = v[source + d]
