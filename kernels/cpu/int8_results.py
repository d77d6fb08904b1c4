"""From exact sums to results: y[t, n] = fp32(sum + correction) * scales[n] * row_scales[t], each operation rounded.

Then bias is added, and then the residual. How the work was cut shows in no result.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, inlined, intrinsic
from kernels.cpu.int8_product import Product
from kernels.cpu.int8_tiles import prefetch
from kernels.cpu.simd import I32, LANES, VECTOR, WORDS, index


def stack_words(count: int) -> Any:
    """An intrinsic without arguments: int32 memory of the calling function's, on a cache line's boundary."""

    @intrinsic
    def words_on_stack(typing: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = cgutils.alloca_once(builder, ir.ArrayType(I32, count))
            memory.align = 64
            return builder.gep(memory, [index(0), index(0)])

        return types.CPointer(types.int32)(), emit

    return words_on_stack


@intrinsic
def corrected(typing: Any, sums: Any, at: Any, corrections: Any, corrections_at: Any) -> Any:
    """fp32(sums + corrections) for 16 of each; int32 pointers, offsets in elements."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b = (
            builder.load(builder.bitcast(builder.gep(pointer, [first]), WORDS.as_pointer()), align=4)
            for pointer, first in (args[:2], args[2:])
        )
        return builder.sitofp(builder.add(a, b), VECTOR)

    return simd.lanes(sums, types.int64, corrections, types.int64), emit


@intrinsic
def as_floats(typing: Any, pointer: Any) -> Any:
    """The same memory as fp32."""
    result = types.CPointer(types.float32)
    return result(pointer), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(result)
    )


@intrinsic
def moved_words(typing: Any, pointer: Any, at: Any) -> Any:
    """An int32 pointer, `at` elements further."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@compiled
def write_results(
    product: Product,
    sums: Any,
    sums_at: int,
    sums_width: int,
    first_row: int,
    num_rows: int,
    first_panel: int,
    num_panels: int,
) -> None:
    """sums [num_rows, sums_width] int32, from element `sums_at` on -> the output's rows and panels from the first on.

    May destroy `sums`.
    """
    for p in range(num_panels):
        panel_sums_at = sums_at + p * LANES
        if (first_panel + p + 1) * LANES > product.num_outputs:
            _write_last_panel(product, sums, panel_sums_at, sums_width, first_row, num_rows, first_panel + p)
        elif product.is_added:
            _write_panel(product, sums, panel_sums_at, sums_width, first_row, num_rows, first_panel + p, True)
        else:
            _write_panel(product, sums, panel_sums_at, sums_width, first_row, num_rows, first_panel + p, False)


@inlined
def _scaled(product: Product, sums: Any, at: int, row: int, n: int) -> Any:
    value = simd.multiply(
        corrected(sums, at, simd.ints32(product.corrections), n), simd.load(simd.floats(product.scales), n)
    )
    if product.row_scales:
        value = simd.multiply(value, simd.splat(simd.floats(product.row_scales)[row]))
    if product.bias:
        value = simd.add(value, simd.load(simd.floats(product.bias), n))
    return value


@compiled
def _write_panel(
    product: Product,
    sums: Any,
    sums_at: int,
    sums_width: int,
    first_row: int,
    num_rows: int,
    panel: int,
    is_added: bool,
) -> None:
    n = panel * LANES
    output = simd.floats(product.output + 4 * first_row * product.output_stride)
    for r in range(num_rows):
        value = _scaled(product, sums, sums_at + r * sums_width, first_row + r, n)
        at = r * product.output_stride + n
        if is_added:
            value = simd.add(simd.load(output, at), value)
        simd.store(output, at, value)


@compiled
def _write_last_panel(
    product: Product, sums: Any, sums_at: int, sums_width: int, first_row: int, num_rows: int, panel: int
) -> None:
    """As far as it has outputs."""
    n, scratch = panel * LANES, as_floats(sums)
    for r in range(num_rows):
        at = sums_at + r * sums_width
        simd.store(scratch, at, _scaled(product, sums, at, first_row + r, n))
        output = simd.floats(product.output + 4 * (first_row + r) * product.output_stride)
        for i in range(n, product.num_outputs):
            output[i] = output[i] + scratch[at + i - n] if product.is_added else scratch[at + i - n]


@intrinsic
def expect_writes(typing: Any, output: Any, at: Any) -> Any:
    """Has a line of memory brought near for writing."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, builder.gep(args[0], [args[1]]), is_write=True)
        return context.get_dummy_value()

    return types.void(output, types.int64), emit


@compiled
def expect_results(product: Product, first_row: int, num_rows: int, panel: int, num_panels: int) -> None:
    output = simd.floats(product.output + 4 * first_row * product.output_stride)
    for r in range(num_rows):
        for p in range(num_panels):
            expect_writes(output, r * product.output_stride + (panel + p) * LANES)
