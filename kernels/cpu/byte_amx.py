"""The products of `byte_products` for sixteen rows at once, by AMX."""

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import amx
from kernels.cpu.byte_products import KEY_SHIFT, VALUE_SHIFT
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.features import has_feature
from kernels.cpu.simd import I8, I32, I64, LANES, index, splatted_words, words_at

TILED_ROWS = amx.TILE_ROWS
_COLUMNS = 2
_HIGH, _LOW, _B = 4, 5, 6  # tiles; those before hold sums: of the high part, then of the low part
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


def _tile_block(*, is_b_unsigned: bool) -> Any:
    """An intrinsic with `byte_tile`'s arguments, for 16 rows and 2 vectors; b_stride and steps are multiples of 64 and
    of 16. Precondition: tiles are configured, all with 16 rows."""

    @intrinsic
    def block(
        typing: Any, y: Any, y_at: Any, y_stride: Any, start: Any, start_at: Any, a: Any, a_at: Any, a_stride: Any,
        low_at: Any, shift: Any, b: Any, b_at: Any, b_stride: Any, steps: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        signature = types.void(y, i, i, start, i, a, i, i, i, i, b, i, i, i)
        name = "tdpbsud" if is_b_unsigned else "tdpbusd"
        return signature, lambda context, builder, signature, args: _emit(context, builder, args, name)

    return block


def _emit(context: Any, builder: Any, args: Any, multiply: str) -> Any:
    y, y_at, y_stride, start, start_at, a, a_at, a_stride, low_at, shift, b, b_at, b_stride, steps = args
    sums = _emit_sums(builder, (a, a_at, a_stride, low_at), (b, b_at, b_stride), steps, multiply)
    shifts = splatted_words(builder, builder.trunc(shift, I32))
    with cgutils.for_range(builder, index(TILED_ROWS)) as loop:
        first = builder.load(builder.gep(start, [builder.add(start_at, loop.index)]))
        for c in range(_COLUMNS):
            at = builder.mul(loop.index, index(2 * _COLUMNS * LANES))
            parts = [words_at(builder, sums, builder.add(at, index((_COLUMNS * p + c) * LANES))) for p in range(2)]
            high, low = (builder.load(part, align=64) for part in parts)
            total = builder.add(builder.add(builder.shl(high, shifts), low), splatted_words(builder, first))
            to = builder.add(builder.add(y_at, builder.mul(y_stride, loop.index)), index(c * LANES))
            builder.store(total, words_at(builder, y, to), align=4)
    return context.get_dummy_value()


def _emit_sums(builder: Any, a: Any, b: Any, steps: Any, multiply: str) -> Any:
    """[16 rows, high and low, 2 vectors] of sums, in the stack frame."""
    a, a_at, a_stride, low_at = a
    b, b_at, b_stride = b
    memory = cgutils.alloca_once(builder, ir.ArrayType(I32, TILED_ROWS * 2 * _COLUMNS * LANES))
    memory.align = 64
    for tile in range(2 * _COLUMNS):
        amx.zero(builder, tile)
    with cgutils.for_range(builder, builder.udiv(steps, index(_STEPS))) as loop:
        depth = builder.add(a_at, builder.mul(loop.index, index(amx.TILE_BYTES)))
        amx.load(builder, _HIGH, builder.gep(a, [depth]), a_stride)
        amx.load(builder, _LOW, builder.gep(a, [builder.add(depth, low_at)]), a_stride)
        b_row = builder.add(b_at, builder.mul(builder.mul(loop.index, index(_STEPS)), b_stride))
        for c in range(_COLUMNS):
            at = builder.add(b_row, index(c * amx.TILE_BYTES))
            amx.load(builder, _B + c, builder.gep(b, [at]), b_stride)
            for p, part in enumerate((_HIGH, _LOW)):
                amx.call(builder, multiply, [I8(_COLUMNS * p + c), I8(part), I8(_B + c)])
    sums = builder.bitcast(memory, I32.as_pointer())
    for tile in range(2 * _COLUMNS):
        to = builder.bitcast(builder.gep(sums, [index(tile * LANES)]), I8.as_pointer())
        amx.store(builder, tile, to, index(4 * 2 * _COLUMNS * LANES))
    return sums


_key_block = _tile_block(is_b_unsigned=True)
_value_block = _tile_block(is_b_unsigned=False)


@compiled
def tiled_key_product(
    y: Any, y_at: int, y_stride: int, start: Any, start_at: int, a: Any, a_at: int, a_stride: int, low_at: int, b: Any,
    steps: int,
) -> None:  # fmt: skip
    """As `key_product`, for sixteen rows; steps a multiple of 16."""
    for c in range(0, 4, _COLUMNS):
        _key_block(
            y, y_at + c * LANES, y_stride, start, start_at, a, a_at, a_stride, low_at, KEY_SHIFT, b, 4 * LANES * c,
            4 * LANES * 4, steps,
        )  # fmt: skip


@compiled
def tiled_value_product(
    columns: int, y: Any, y_at: int, y_stride: int, zeros: Any, a: Any, a_at: int, a_stride: int, low_at: int, b: Any,
    b_stride: int, steps: int,
) -> None:  # fmt: skip
    """As `value_product`, for sixteen rows and at least two columns; the last pair may overlap the one before."""
    for c in range(0, columns, _COLUMNS):
        first = min(c, columns - _COLUMNS)
        _value_block(
            y, y_at + first * LANES, y_stride, zeros, 0, a, a_at, a_stride, low_at, VALUE_SHIFT, b, 4 * LANES * first,
            b_stride, steps,
        )  # fmt: skip
