"""From exact sums to results: y[t, n] = fp32(sum + correction) * scales[n] * row_scales[t], each operation rounded.

Then bias is added, and then the residual. How the work was cut shows in no result.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.int8_product import Product
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
    row_scales, scales = simd.floats(product.row_scales), simd.floats(product.scales)
    corrections, bias = simd.ints32(product.corrections), simd.floats(product.bias)
    for r in range(num_rows):
        row = first_row + r
        output = simd.floats(product.output + 4 * row * product.output_stride)
        for p in range(num_panels):
            at, n = sums_at + r * sums_width + p * LANES, (first_panel + p) * LANES
            value = simd.multiply(corrected(sums, at, corrections, n), simd.load(scales, n))
            if product.row_scales:
                value = simd.multiply(value, simd.splat(row_scales[row]))
            if product.bias:
                value = simd.add(value, simd.load(bias, n))
            if n + LANES <= product.num_outputs:
                if product.is_added:
                    value = simd.add(simd.load(output, n), value)
                simd.store(output, n, value)
            else:
                _write_tail(as_floats(sums), at, value, output, n, product)


@compiled
def _write_tail(scratch: Any, at: int, value: Any, output: Any, n: int, product: Product) -> None:
    """The outputs of the last panel that are there."""
    simd.store(scratch, at, value)
    for i in range(product.num_outputs - n):
        if product.is_added:
            output[n + i] = output[n + i] + scratch[at + i]
        else:
            output[n + i] = scratch[at + i]
