"""The products of `byte_products` for sixteen rows at once, by AMX."""

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import amx
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.features import has_feature
from kernels.cpu.simd import I8, I64, LANES, index

TILED_ROWS = amx.TILE_ROWS
TILED_COLUMNS = 4
_A, _B, _NUM_B = 4, 5, 3  # tiles; those before hold sums
_STEPS = amx.TILE_BYTES // 4

_SYS_ARCH_PRCTL, _GET_PERMISSIONS, _TILE_DATA = 158, 0x1022, 18

IS_COMPILED = sys.platform == "linux" and has_feature("amx-int8")
if IS_COMPILED:
    amx.linux_grants_amx()


@intrinsic
def tiles_are_granted(typing: Any) -> Any:
    """Whether this process may use tiles: asked when run, as processes that may not share this code on disk."""
    return (
        types.boolean(),
        lambda context, builder, signature, args: (
            _emit_granted(builder) if IS_COMPILED else ir.Constant(ir.IntType(1), 0)
        ),
    )


def _emit_granted(builder: Any) -> Any:
    granted = cgutils.alloca_once(builder, I64)
    builder.store(index(0), granted)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, [I64], var_arg=True), "syscall")
    builder.call(function, [index(_SYS_ARCH_PRCTL), index(_GET_PERMISSIONS), granted])
    return builder.trunc(builder.lshr(builder.load(granted), index(_TILE_DATA)), ir.IntType(1))


def _tile_block(*, is_a_unsigned: bool) -> Any:
    """An intrinsic for 16 rows and 4 vectors: y[r, n] = sum over k of a[r, k] * b[k, n], mod 2^32; b is signed.

    Pointers, first elements and strides of y, a and b as in `byte_tile`; b_stride and steps are multiples of 64 and of
    16. Precondition: tiles are configured, all with 16 rows.
    """

    @intrinsic
    def block(
        typing: Any, y: Any, y_at: Any, y_stride: Any, a: Any, a_at: Any, a_stride: Any, b: Any, b_at: Any,
        b_stride: Any, steps: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        signature = types.void(y, i, i, a, i, i, b, i, i, i)
        return signature, lambda context, builder, signature, args: _emit(context, builder, args, is_a_unsigned)

    return block


def _emit(context: Any, builder: Any, args: Any, is_a_unsigned: bool) -> Any:
    y, y_at, y_stride, a, a_at, a_stride, b, b_at, b_stride, steps = args
    for c in range(TILED_COLUMNS):
        amx.zero(builder, c)
    multiply = "tdpbusd" if is_a_unsigned else "tdpbssd"
    with cgutils.for_range(builder, builder.udiv(steps, index(_STEPS))) as loop:
        depth = builder.add(a_at, builder.mul(loop.index, index(amx.TILE_BYTES)))
        amx.load(builder, _A, builder.gep(a, [depth]), a_stride)
        b_row = builder.add(b_at, builder.mul(builder.mul(loop.index, index(_STEPS)), b_stride))
        for c in range(TILED_COLUMNS):
            tile = _B + c % _NUM_B
            amx.load(builder, tile, builder.gep(b, [builder.add(b_row, index(c * amx.TILE_BYTES))]), b_stride)
            amx.call(builder, multiply, [I8(c), I8(_A), I8(tile)])
    for c in range(TILED_COLUMNS):
        to = _bytes_at(builder, y, builder.add(y_at, index(c * LANES)))
        amx.store(builder, c, to, builder.mul(y_stride, index(4)))
    return context.get_dummy_value()


def _bytes_at(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), I8.as_pointer())


_key_block = _tile_block(is_a_unsigned=False)
_value_block = _tile_block(is_a_unsigned=True)


@compiled
def tiled_key_product(y: Any, y_at: int, y_stride: int, a: Any, a_at: int, a_stride: int, b: Any, steps: int) -> None:
    """As `key_product` without starts, for sixteen rows; steps a multiple of 16."""
    _key_block(y, y_at, y_stride, a, a_at, a_stride, b, 0, 4 * LANES * TILED_COLUMNS, steps)


@compiled
def tiled_value_product(
    columns: int, y: Any, y_at: int, y_stride: int, a: Any, a_at: int, a_stride: int, b: Any, b_stride: int, steps: int
) -> None:
    """As `value_product`, for sixteen rows and at least four columns; the last four may overlap those before."""
    for c in range(0, columns, TILED_COLUMNS):
        first = min(c, columns - TILED_COLUMNS)
        _value_block(y, y_at + first * LANES, y_stride, a, a_at, a_stride, b, 4 * LANES * first, b_stride, steps)
