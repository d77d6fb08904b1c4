"""Products on CPUs with AVX-512 VNNI."""

from kernels.cpu import simd
from kernels.cpu.compiling import compiled
from kernels.cpu.int8_product import Product, panel_kernel, read_product
from kernels.cpu.int8_results import stack_words, write_results
from kernels.cpu.int8_tiles import VNNI, Shape, dot_tile
from kernels.cpu.simd import LANES

_MANY_ROWS, _PANELS = 8, 3
_tile_1 = dot_tile(Shape(rows=1, panels=_PANELS, splits=1, unroll=4, ahead=0), VNNI)
_tile_2 = dot_tile(Shape(rows=2, panels=_PANELS, splits=1, unroll=4, ahead=0), VNNI)
_tile_4 = dot_tile(Shape(rows=4, panels=_PANELS, splits=1, unroll=2, ahead=0), VNNI)
_tile_8 = dot_tile(Shape(rows=_MANY_ROWS, panels=_PANELS, splits=1, unroll=1, ahead=0), VNNI)
_sums_memory = stack_words(_MANY_ROWS * _PANELS * LANES)


@compiled
def multiply_with_vnni(product: Product, first_panel: int, end_panel: int) -> None:
    panel_stride, depth = LANES * product.padded_depth, product.padded_depth
    sums = _sums_memory()
    for panel in range(first_panel, end_panel, _PANELS):
        num_panels = min(_PANELS, end_panel - panel)
        weights = simd.bytes_signed(product.values + panel * panel_stride)
        row = 0
        while row < product.num_rows:
            num_rows = min(_MANY_ROWS, product.num_rows - row)
            rows, stride = simd.bytes_unsigned(product.rows + row * product.row_stride), product.row_stride
            if num_rows > 4:
                _tile_8(rows, stride, num_rows, weights, panel_stride, num_panels, depth, sums)
            elif num_rows > 2:
                _tile_4(rows, stride, num_rows, weights, panel_stride, num_panels, depth, sums)
            elif num_rows == 2:
                _tile_2(rows, stride, num_rows, weights, panel_stride, num_panels, depth, sums)
            else:
                _tile_1(rows, stride, num_rows, weights, panel_stride, num_panels, depth, sums)
            write_results(product, sums, 0, _PANELS * LANES, row, num_rows, panel, num_panels)
            row += num_rows


@panel_kernel
def multiply(product_address: int, first_panel: int, end_panel: int) -> None:
    multiply_with_vnni(read_product(product_address), first_panel, end_panel)
