"""One product of quantized rows with packed weights, as compiled code knows it, and the way to call a kernel for it.

A kernel is called by its address: the caller's code on disk serves whichever kernel a process chose, and holds no copy
of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.simd import I64, index


class Product(NamedTuple):
    """output[t, n] = sum over k of (rows[t, k] - 128) * weight[n, k], scaled. Memory is named by address, 0: none."""

    rows: int  # [num_rows, padded depth] uint8; what they hold beyond the depth does not matter, weights there are 0
    row_stride: int  # bytes
    row_scales: int  # [num_rows] fp32, or 0: not multiplied
    num_rows: int
    values: int  # as PackedWeight's
    corrections: int
    scales: int
    num_outputs: int
    padded_depth: int
    bias: int  # [num_outputs rounded up to whole panels] fp32, or 0
    output: int  # [num_rows, num_outputs] fp32
    output_stride: int  # elements
    is_added: int  # 1: results are added to what the output holds; 0: they replace it


NUM_FIELDS = len(Product._fields)
PRODUCT_FIELDS = types.UniTuple(types.int64, NUM_FIELDS)


@compiled
def read_product(address: int) -> Product:
    f = simd.ints64(address)
    return Product(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12])


def panel_kernel(function: Callable[[int, int, int], None]) -> Any:
    """Compiles a function of (address of a Product's fields, first panel, end panel), or loads it; the result has an
    `address`."""
    return numba.cfunc(types.void(types.int64, types.int64, types.int64), cache=True)(function)


@intrinsic
def multiply_panels(typing: Any, kernel: Any, product: Any, first_panel: Any, end_panel: Any) -> Any:
    """Writes the outputs of panels [first_panel, end_panel) of a Product, by the kernel at that address."""
    i = types.int64

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(I64, NUM_FIELDS))
        for at, field in enumerate(cgutils.unpack_tuple(builder, args[1], NUM_FIELDS)):
            builder.store(field, builder.gep(memory, [index(0), index(at)]))
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [I64] * 3).as_pointer())
        builder.call(function, [builder.ptrtoint(memory, I64), args[2], args[3]])
        return context.get_dummy_value()

    return types.void(i, product, i, i), emit
