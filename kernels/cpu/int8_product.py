"""One product of quantized rows with packed weights, as compiled code knows it, and the way to call a kernel for it.

A kernel is called by its address: the caller's code on disk serves whichever kernel a process chose, and holds no copy
of it.
"""

from typing import NamedTuple

from numba import types

from kernels.cpu import simd
from kernels.cpu.calls import call_with_fields_2
from kernels.cpu.compiling import called_by_address, compiled


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


panel_kernel = called_by_address(3)
"""Of (address of a Product's fields, first panel, end panel)."""


@compiled
def multiply_panels(kernel: int, product: Product, first_panel: int, end_panel: int) -> None:
    """Writes the outputs of panels [first_panel, end_panel) of a Product, by the kernel at that address."""
    call_with_fields_2(kernel, product, first_panel, end_panel)
