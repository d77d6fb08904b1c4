"""Products on CPUs with AMX: a row or two take no longer than their weights' way from memory."""

from typing import Any

from numba import types

from kernels.cpu import amx, simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.int8_amx_many import multiply_many
from kernels.cpu.int8_product import Product, panel_kernel, read_product
from kernels.cpu.int8_results import expect_results, stack_words, write_results
from kernels.cpu.int8_tiles import LINE, clamped, prefetch
from kernels.cpu.simd import I64, LANES, index

_FEW_ROWS = 2 * amx.TILE_ROWS
_PANELS = 4
_INPUTS, _WEIGHTS = 4, 6  # the first tiles of each; those before hold sums
_WEIGHT_TILES = 0b1100_0000
_sums_memory = stack_words(2 * amx.TILE_ROWS * _PANELS * LANES)


def _tile_block(row_tiles: int, panels: int) -> Any:
    """An intrinsic: sums[tile, r, p, n] = sum over k of rows[r, k] * panels[p, k // 4, n, k % 4], mod 2^32, for one or
    two tiles of rows.

    Arguments: the tiles' first rows (uint8 pointers), the rows' stride in bytes; panels (int8 pointer), their stride in
    bytes, how many (the last stands in for those missing); depth (a positive multiple of 64); how many bytes ahead of
    its use a weight is fetched; sums (int32 pointer, [tiles, 16, panels, 16]).
    """

    @intrinsic
    def block(
        typing: Any, rows: Any, more_rows: Any, row_stride: Any, panels_: Any, panel_stride: Any, num_panels: Any,
        depth: Any, ahead: Any, sums: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        return types.void(rows, rows, i, panels_, i, i, i, i, sums), lambda context, builder, signature, args: _emit(
            context, builder, args, row_tiles, panels
        )

    return block


def _emit(context: Any, builder: Any, args: Any, row_tiles: int, panels: int) -> Any:
    rows, more_rows, row_stride, weights, panel_stride, num_panels, depth, ahead, sums = args
    row_starts = [rows, more_rows][:row_tiles]
    panel_starts = clamped(builder, weights, panel_stride, num_panels, panels)
    for tile in range(row_tiles * panels):
        amx.zero(builder, tile)

    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    panel_at = builder.mul(k, index(LANES))
    next_panel_at = builder.add(panel_at, ahead)
    for t, start in enumerate(row_starts):
        amx.load(builder, _INPUTS + t, builder.gep(start, [k]), row_stride)
    for p, start in enumerate(panel_starts):
        tile = _WEIGHTS + p % 2
        amx.load(builder, tile, builder.gep(start, [panel_at]), index(LINE))
        for line in range(amx.TILE_ROWS):
            prefetch(builder, builder.gep(start, [builder.add(next_panel_at, index(LINE * line))]))
        for t in range(row_tiles):
            amx.add_products(builder, t * panels + p, _INPUTS + t, tile)
    k_next = builder.add(k, index(amx.TILE_BYTES))
    builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
    k.add_incoming(index(0), before)
    k.add_incoming(k_next, loop)

    builder.position_at_end(after)
    for t in range(row_tiles):
        for p in range(panels):
            at = builder.gep(sums, [index((t * amx.TILE_ROWS * panels + p) * LANES)])
            amx.store(builder, t * panels + p, builder.bitcast(at, rows.type), index(4 * panels * LANES))
    return context.get_dummy_value()


_two_by_two = _tile_block(2, 2)
_one_by_four = _tile_block(1, 4)


@compiled
def _write_tile(
    product: Product, sums: Any, sums_at: int, width: int, tile: int, height: int, panel: int, end: int
) -> None:
    """Rows that the tile before has too are its own."""
    first = tile * height
    skipped = first - min(first, product.num_rows - height)
    num_panels = min(width, end - panel)
    at = sums_at + skipped * width * LANES
    write_results(product, sums, at, width * LANES, first, height - skipped, panel, num_panels)


@compiled
def multiply_with_amx(product: Product, first_panel: int, end_panel: int) -> None:
    """Rows are cut into the fewest tiles of one height; the last may begin within the one before."""
    if product.num_rows == 0:
        return
    if product.num_rows > _FEW_ROWS:
        multiply_many(product, first_panel, end_panel, False)
        return
    panel_stride, depth, stride = LANES * product.padded_depth, product.padded_depth, product.row_stride
    num_tiles = -(-product.num_rows // amx.TILE_ROWS)
    height = -(-product.num_rows // num_tiles)
    sums = _sums_memory()
    amx.configure_tiles(height, _WEIGHT_TILES)
    for group in range(first_panel, end_panel, _PANELS):
        group_end = min(group + _PANELS, end_panel)
        ahead = _PANELS * panel_stride  # the first rows fetch the next panels for all
        for tile in range(0, num_tiles - 1, 2):
            rows = simd.bytes_unsigned(product.rows + tile * height * stride)
            last = min((tile + 1) * height, product.num_rows - height)
            more_rows = simd.bytes_unsigned(product.rows + last * stride)
            for panel in range(group, group_end, 2):
                weights = simd.bytes_signed(product.values + panel * panel_stride)
                expect_results(product, tile * height, 2 * height, panel, 2)
                _two_by_two(rows, more_rows, stride, weights, panel_stride, group_end - panel, depth, ahead, sums)
                _write_tile(product, sums, 0, 2, tile, height, panel, group_end)
                _write_tile(product, sums, amx.TILE_ROWS * 2 * LANES, 2, tile + 1, height, panel, group_end)
            ahead = 0
        if num_tiles % 2:
            last = product.num_rows - height
            rows = simd.bytes_unsigned(product.rows + last * stride)
            weights = simd.bytes_signed(product.values + group * panel_stride)
            expect_results(product, last, height, group, group_end - group)
            _one_by_four(rows, rows, stride, weights, panel_stride, group_end - group, depth, ahead, sums)
            _write_tile(product, sums, 0, 4, num_tiles - 1, height, group, group_end)
    amx.release_tiles()


@panel_kernel
def multiply(product_address: int, first_panel: int, end_panel: int) -> None:
    multiply_with_amx(read_product(product_address), first_panel, end_panel)


@panel_kernel
def multiply_gated(product_address: int, first_panel: int, end_panel: int) -> None:
    """Preconditions: as `multiply_many`'s of a gated product."""
    multiply_many(read_product(product_address), first_panel, end_panel, True)
