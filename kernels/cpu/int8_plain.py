"""Products on any CPU, with whatever vectors LLVM finds."""

from kernels.cpu import simd
from kernels.cpu.compiling import compiled
from kernels.cpu.int8_product import Product, panel_kernel, read_product
from kernels.cpu.int8_results import stack_words, write_results
from kernels.cpu.int8_tiles import PLAIN, Shape, dot_tile
from kernels.cpu.simd import LANES

_MANY_ROWS = 2
_tile_1 = dot_tile(Shape(rows=1, panels=1, splits=1, unroll=1, ahead=0), PLAIN)
_tile_2 = dot_tile(Shape(rows=_MANY_ROWS, panels=1, splits=1, unroll=1, ahead=0), PLAIN)
_sums_memory = stack_words(_MANY_ROWS * LANES)


@compiled
def multiply_with_plain_vectors(product: Product, first_panel: int, end_panel: int) -> None:
    panel_stride, depth, stride = LANES * product.padded_depth, product.padded_depth, product.row_stride
    sums = _sums_memory()
    for panel in range(first_panel, end_panel):
        weights = simd.bytes_signed(product.values + panel * panel_stride)
        for row in range(0, product.num_rows, _MANY_ROWS):
            num_rows = min(_MANY_ROWS, product.num_rows - row)
            rows = simd.bytes_unsigned(product.rows + row * stride)
            if num_rows == _MANY_ROWS:
                _tile_2(rows, stride, num_rows, weights, panel_stride, 1, depth, sums)
            else:
                _tile_1(rows, stride, num_rows, weights, panel_stride, 1, depth, sums)
            write_results(product, sums, 0, LANES, row, num_rows, panel, 1)


@panel_kernel
def multiply(product_address: int, first_panel: int, end_panel: int) -> None:
    multiply_with_plain_vectors(read_product(product_address), first_panel, end_panel)
