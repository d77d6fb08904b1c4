"""Products of many rows on CPUs with AMX, two tiles of rows by two panels at once: a quad. While the sums of one quad
are computed, the results of the one before are made of its sums, for each keeps other parts of the core busy.

A gated product's outputs are gates, then as many others; what is written is silu(gate) * other. A quad's panels are
then one of gates and one of the others.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from kernels.cpu import amx, simd
from kernels.cpu.compiling import compiled, inlined, intrinsic
from kernels.cpu.elementary import silu_mul_lanes
from kernels.cpu.int8_product import Product
from kernels.cpu.int8_results import corrected, moved_words, stack_words, write_results
from kernels.cpu.int8_tiles import LINE, prefetch
from kernels.cpu.simd import LANES, index

_PAIRS = 4
"""Pairs of panels that all rows are multiplied with before the next ones are."""
_ROWS_PER_STEP = 4
"""Of the quad before, whose results are made in one step of the depth: all 32 of them in eight steps."""
_TILE_SUMS = amx.TILE_ROWS * LANES
_QUAD_SUMS = 4 * _TILE_SUMS
_sums_memory = stack_words(2 * _QUAD_SUMS)


class _Quad(NamedTuple):
    """Two tiles by their first rows, each with how many of its rows the tile before has too; and two panels."""

    row: int
    skipped: int
    more_row: int
    more_skipped: int
    panel: int
    more_panel: int


class _Factors(NamedTuple):
    """Of a quad's panels, sixteen lanes each."""

    scales: Any
    more_scales: Any
    bias: Any
    more_bias: Any


@intrinsic
def _clear(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(4):
            amx.zero(builder, tile)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _add_products(typing: Any, rows: Any, more_rows: Any, row_stride: Any, panel: Any, more_panel: Any) -> Any:
    """Adds the products of 64 inputs to tiles 0 and 1 (the first rows' with each panel), 2 and 3 (the other rows')."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, more_rows, row_stride, panel, more_panel = args
        amx.load(builder, 4, rows, row_stride)
        amx.load(builder, 5, more_rows, row_stride)
        for p, start in enumerate((panel, more_panel)):
            amx.load(builder, 6 + p, start, index(LINE))
            amx.add_products(builder, p, 4, 6 + p)
            amx.add_products(builder, 2 + p, 5, 6 + p)
        return context.get_dummy_value()

    i = types.int64
    return types.void(rows, more_rows, i, panel, more_panel), emit


@intrinsic
def _store(typing: Any, sums: Any) -> Any:
    """sums[tile, row, output] = the four tiles."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(4):
            at = builder.gep(args[0], [index(tile * _TILE_SUMS)])
            amx.store(builder, tile, builder.bitcast(at, simd.I8.as_pointer()), index(4 * LANES))
        return context.get_dummy_value()

    return types.void(sums), emit


@intrinsic
def _fetch(typing: Any, panel: Any, at: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(panel, types.int64), emit


@inlined
def _factors(product: Product, quad: _Quad) -> _Factors:
    scales, n, m = simd.floats(product.scales), quad.panel * LANES, quad.more_panel * LANES
    bias, more_bias = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    if product.bias:
        bias, more_bias = simd.load(simd.floats(product.bias), n), simd.load(simd.floats(product.bias), m)
    return _Factors(simd.load(scales, n), simd.load(scales, m), bias, more_bias)


@inlined
def _write_row(product: Product, sums: Any, quad: _Quad, factors: _Factors, r: int, is_gated: bool) -> None:
    """Row r of the first tile, or r - 16 of the second."""
    row, skipped, n, m = quad.row + r, quad.skipped, quad.panel * LANES, quad.more_panel * LANES
    sums_at = r * LANES
    if r >= amx.TILE_ROWS:
        r -= amx.TILE_ROWS
        row, skipped, sums_at = quad.more_row + r, quad.more_skipped, 2 * _TILE_SUMS + r * LANES
    if r < skipped:
        return
    corrections = simd.ints32(product.corrections)
    value = simd.multiply(corrected(sums, sums_at, corrections, n), factors.scales)
    other = simd.multiply(corrected(sums, sums_at + _TILE_SUMS, corrections, m), factors.more_scales)
    if product.row_scales:
        scale = simd.splat(simd.floats(product.row_scales)[row])
        value, other = simd.multiply(value, scale), simd.multiply(other, scale)
    if product.bias:
        value, other = simd.add(value, factors.bias), simd.add(other, factors.more_bias)
    output = simd.floats(product.output + 4 * row * product.output_stride)
    if is_gated:
        simd.store(output, n, silu_mul_lanes(value, other))
        return
    if product.is_added:
        value, other = simd.add(simd.load(output, n), value), simd.add(simd.load(output, m), other)
    simd.store(output, n, value)
    simd.store(output, m, other)


@compiled
def _multiply_quad(
    product: Product, quad: _Quad, ahead: int, first_line: int, end_line: int, before: _Quad, num_before: int,
    sums_before: Any, is_gated: bool,
) -> None:  # fmt: skip
    """Leaves the quad's sums in the tiles. Fetches lines [first_line, end_line) of each KiB of what lies `ahead` of its
    weights, and writes the results of `num_before` rows of the quad before."""
    depth, stride = product.padded_depth, product.row_stride
    row_address, more_address = product.rows + quad.row * stride, product.rows + quad.more_row * stride
    panel_address, more_panel_address = (
        product.values + quad.panel * LANES * depth,
        product.values + quad.more_panel * LANES * depth,
    )
    factors = _factors(product, before)
    _clear()
    done = 0
    for k in range(0, depth, amx.TILE_BYTES):
        panel, more_panel = (
            simd.bytes_signed(panel_address + k * LANES),
            simd.bytes_signed(more_panel_address + k * LANES),
        )
        rows, more_rows = simd.bytes_unsigned(row_address + k), simd.bytes_unsigned(more_address + k)
        _add_products(rows, more_rows, stride, panel, more_panel)
        for line in range(first_line, end_line):
            _fetch(panel, ahead + line * LINE)
            _fetch(more_panel, ahead + line * LINE)
        if done < num_before:
            for r in range(done, done + _ROWS_PER_STEP):
                _write_row(product, sums_before, before, factors, r, is_gated)
            done += _ROWS_PER_STEP
    for r in range(done, num_before):
        _write_row(product, sums_before, before, factors, r, is_gated)


@inlined
def _quad(product: Product, tile: int, panel: int, more_panel: int) -> _Quad:
    """The last tile begins so that it ends with the rows. Where there is none, all its rows are another's."""
    last, row, more_row = product.num_rows - amx.TILE_ROWS, tile * amx.TILE_ROWS, (tile + 1) * amx.TILE_ROWS
    first, more_first = min(row, last), min(more_row, last)
    return _Quad(first, row - first, more_first, min(more_row - more_first, amx.TILE_ROWS), panel, more_panel)


@compiled
def _is_written_apart(product: Product, quad: _Quad) -> bool:
    """Whether a panel is missing, or not all of it is written."""
    return quad.panel == quad.more_panel or (quad.more_panel + 1) * LANES > product.num_outputs


@compiled
def _write_apart(product: Product, sums: Any, quad: _Quad) -> None:
    for p in range(1 + (quad.more_panel > quad.panel)):
        for tile, row, skipped in ((0, quad.row, quad.skipped), (2, quad.more_row, quad.more_skipped)):
            at = (tile + p) * _TILE_SUMS + skipped * LANES
            write_results(product, sums, at, LANES, row + skipped, amx.TILE_ROWS - skipped, quad.panel + p, 1)


@compiled
def multiply_many(product: Product, first_panel: int, end_panel: int, is_gated: bool) -> None:
    """Preconditions: at least 16 rows; a gated product has whole panels, and these are of its gates."""
    num_tile_pairs = -(-product.num_rows // (2 * amx.TILE_ROWS))
    step, distance, last_panel = 2, 1, end_panel - 1
    if is_gated:
        step, distance, last_panel = 1, product.num_outputs // LANES // 2, product.num_outputs // LANES - 1
    sums = _sums_memory()
    before, before_at, num_before = _quad(product, 0, first_panel, first_panel), 0, 0
    amx.configure_tiles(amx.TILE_ROWS, 0b1111_1111)
    for group in range(first_panel, end_panel, step * _PAIRS):
        group_end = min(group + step * _PAIRS, end_panel)
        ahead = step * _PAIRS * LANES * product.padded_depth
        for pair in range(num_tile_pairs):
            # Each pair of tiles fetches its share of the next group, if there is one.
            first_line = pair * LANES // num_tile_pairs
            end_line = (pair + 1) * LANES // num_tile_pairs if group_end < end_panel else first_line
            for panel in range(group, group_end, step):
                quad = _quad(product, 2 * pair, panel, min(panel + distance, last_panel))
                _multiply_quad(
                    product, quad, ahead, first_line, end_line, before, num_before, moved_words(sums, before_at),
                    is_gated,
                )  # fmt: skip
                before, before_at, num_before = quad, _QUAD_SUMS - before_at, 2 * amx.TILE_ROWS
                _store(moved_words(sums, before_at))
                if _is_written_apart(product, quad):
                    _write_apart(product, moved_words(sums, before_at), quad)
                    num_before = 0
    factors = _factors(product, before)
    for r in range(num_before):
        _write_row(product, moved_words(sums, before_at), before, factors, r, is_gated)
    amx.release_tiles()
