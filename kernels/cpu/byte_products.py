"""Products of rows of 16-bit numbers, split into bytes, with matrices of bytes: exact sums in int32, in any order.

Two ways to the same integers: the CPU's instruction for sums of four products of bytes, or plain LLVM IR.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.features import has_feature
from kernels.cpu.simd import I8, I32, I64, LANES, WORDS, index, splatted_words, words, words_at

BYTE_ROWS = 3  # 3 x 4 pairs of sums, 4 vectors of `b` and a factor fill AVX-512's registers
_MAX_COLUMNS = 4
_BYTES = ir.VectorType(I8, 4 * LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_WIDE_HALVES = ir.VectorType(I32, 2 * LANES)
_LLVM_WITH_TYPED_BYTES = 22  # since then the intrinsic takes bytes as bytes

HAS_VNNI = has_feature("avx512vnni")

_AddFours = Callable[[Any, Any, Any, Any], Any]


def add_fours_by_instruction(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Each word of `sums` grows by the sum of four products: its bytes in `unsigned` times those in `signed`."""
    given = _BYTES if llvmlite.binding.llvm_version_info[0] >= _LLVM_WITH_TYPED_BYTES else WORDS
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(WORDS, [WORDS, given, given]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return builder.call(function, [sums, builder.bitcast(unsigned, given), builder.bitcast(signed, given)])


def add_fours_generically(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """The same: even bytes and odd bytes as 16-bit numbers, whose products LLVM adds in pairs where the CPU can."""
    eight = ir.Constant(_HALVES, [8] * (2 * LANES))
    u, s = builder.bitcast(unsigned, _HALVES), builder.bitcast(signed, _HALVES)
    pairs = (
        (builder.and_(u, ir.Constant(_HALVES, [0xFF] * (2 * LANES))), builder.ashr(builder.shl(s, eight), eight)),
        (builder.lshr(u, eight), builder.ashr(s, eight)),
    )
    for a, b in pairs:
        products = builder.mul(builder.sext(a, _WIDE_HALVES), builder.sext(b, _WIDE_HALVES))
        for parity in range(2):
            order = ir.Constant(WORDS, list(range(parity, 2 * LANES, 2)))
            sums = builder.add(sums, builder.shuffle_vector(products, products, order))
    return sums


ADD_FOURS = add_fours_by_instruction if HAS_VNNI else add_fours_generically


def byte_tile(rows: int, columns: int, *, is_b_unsigned: bool, add_fours: _AddFours = ADD_FOURS) -> Any:
    """An intrinsic of `rows` rows and `columns` vectors; for each row r and lane n, mod 2^32:
    y[r * y_stride + n] = start[r] + sum over k of (high[r, k] << shift) * b[k, n] + low[r, k] * b[k, n].

    Pointers, first elements and strides of y (int32), start (int32), a and b (bytes), and steps >= 1 of four k each.
    high[r, 4 * step : + 4] is a[a_at + r * a_stride + 4 * step : + 4], low the same `low_at` further;
    b[4 * step : + 4, n] is b[b_at + step * b_stride + 4 * n : + 4]. One of a and b is unsigned, the other signed.
    """

    @intrinsic
    def tile(
        typing: Any, y: Any, y_at: Any, y_stride: Any, start: Any, start_at: Any, a: Any, a_at: Any, a_stride: Any,
        low_at: Any, shift: Any, b: Any, b_at: Any, b_stride: Any, steps: Any,
    ) -> Any:  # fmt: skip
        def dot(builder: Any, sums: Any, factor: Any, b_lanes: Any) -> Any:
            return add_fours(builder, sums, *((b_lanes, factor) if is_b_unsigned else (factor, b_lanes)))

        i = types.int64
        signature = types.void(y, i, i, start, i, a, i, i, i, i, b, i, i, i)
        return signature, lambda context, builder, signature, args: _emit(context, builder, args, rows, columns, dot)

    return tile


def _emit(context: Any, builder: Any, args: Any, rows: int, columns: int, dot: _AddFours) -> Any:
    y, y_at, y_stride, start, start_at, a, a_at, a_stride, low_at, shift, b, b_at, b_stride, steps = args
    places = [(part, r, c) for part in range(2) for r in range(rows) for c in range(columns)]
    a_rows = [builder.add(a_at, builder.mul(a_stride, index(r))) for r in range(rows)]
    starts = [builder.load(builder.gep(start, [builder.add(start_at, index(r))])) for r in range(rows)]

    before, loop, after = builder.block, builder.append_basic_block("steps"), builder.append_basic_block("done")
    initial = {(part, r, c): splatted_words(builder, starts[r]) if part else words(0) for part, r, c in places}
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    sums = {place: builder.phi(WORDS) for place in places}
    b_row = builder.add(b_at, builder.mul(step, b_stride))
    b_lanes = [_load_bytes(builder, b, builder.add(b_row, index(4 * LANES * c))) for c in range(columns)]
    depth, results = builder.mul(step, index(4)), {}
    for part, r, c in places:
        at = builder.add(builder.add(a_rows[r], depth), low_at if part else index(0))
        factor = splatted_words(builder, builder.load(builder.bitcast(builder.gep(a, [at]), I32.as_pointer()), align=1))
        results[part, r, c] = dot(builder, sums[part, r, c], factor, b_lanes[c])
    step_next = builder.add(step, index(1))
    builder.cbranch(builder.icmp_signed("<", step_next, steps), loop, after)
    for phi, first, following in [(step, index(0), step_next), *((sums[p], initial[p], results[p]) for p in places)]:
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)

    builder.position_at_end(after)
    shifts = splatted_words(builder, builder.trunc(shift, I32))
    for r in range(rows):
        for c in range(columns):
            at = builder.add(builder.add(y_at, builder.mul(y_stride, index(r))), index(LANES * c))
            total = builder.add(builder.shl(results[0, r, c], shifts), results[1, r, c])
            builder.store(total, words_at(builder, y, at), align=4)
    return context.get_dummy_value()


def _load_bytes(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(pointer, [at]), WORDS.as_pointer()), align=1)


_key_tiles = [byte_tile(rows, _MAX_COLUMNS, is_b_unsigned=True) for rows in (1, 2, 3)]
_key_tile_1, _key_tile_2, _key_tile_3 = _key_tiles
_value_tiles = [byte_tile(rows, _MAX_COLUMNS, is_b_unsigned=False) for rows in (1, 2, 3)]
_value_tile_1, _value_tile_2, _value_tile_3 = _value_tiles
_value_tile_1x1 = byte_tile(1, 1, is_b_unsigned=False)

KEY_SHIFT, VALUE_SHIFT = 7, 8


@compiled
def key_product(
    rows: int, y: Any, y_at: int, y_stride: int, start: Any, start_at: int, a: Any, a_at: int, a_stride: int,
    low_at: int, b: Any, steps: int,
) -> None:  # fmt: skip
    """y[rows, 64] = start + a @ b: a signed [rows, 4 * steps], 7 bits to the low part; b unsigned [steps, 64, 4]."""
    b_stride = 4 * LANES * _MAX_COLUMNS
    for r in range(0, rows, BYTE_ROWS):
        at, first, source = y_at + r * y_stride, start_at + r, a_at + r * a_stride
        if rows - r >= BYTE_ROWS:
            _key_tile_3(y, at, y_stride, start, first, a, source, a_stride, low_at, KEY_SHIFT, b, 0, b_stride, steps)
        elif rows - r == 2:
            _key_tile_2(y, at, y_stride, start, first, a, source, a_stride, low_at, KEY_SHIFT, b, 0, b_stride, steps)
        else:
            _key_tile_1(y, at, y_stride, start, first, a, source, a_stride, low_at, KEY_SHIFT, b, 0, b_stride, steps)


@compiled
def value_product(
    rows: int, columns: int, y: Any, y_at: int, y_stride: int, zeros: Any, a: Any, a_at: int, a_stride: int,
    low_at: int, b: Any, b_at: int, b_stride: int, steps: int,
) -> None:  # fmt: skip
    """y[rows, 16 * columns] = a @ b: a unsigned [rows, 4 * steps], 8 bits to the low part; b signed, a step 4 * 16 *
    columns bytes of `b_stride`. `zeros` are BYTE_ROWS of int32."""
    for r in range(0, rows, BYTE_ROWS):
        source, count, done = a_at + r * a_stride, min(BYTE_ROWS, rows - r), 0
        while columns - done >= _MAX_COLUMNS:
            at, b_first = y_at + r * y_stride + done * LANES, b_at + 4 * LANES * done
            if count == BYTE_ROWS:
                _value_tile_3(
                    y, at, y_stride, zeros, 0, a, source, a_stride, low_at, VALUE_SHIFT, b, b_first, b_stride, steps
                )
            elif count == 2:
                _value_tile_2(
                    y, at, y_stride, zeros, 0, a, source, a_stride, low_at, VALUE_SHIFT, b, b_first, b_stride, steps
                )
            else:
                _value_tile_1(
                    y, at, y_stride, zeros, 0, a, source, a_stride, low_at, VALUE_SHIFT, b, b_first, b_stride, steps
                )
            done += _MAX_COLUMNS
        for c in range(done, columns):
            for i in range(count):
                at, b_first = y_at + (r + i) * y_stride + c * LANES, b_at + 4 * LANES * c
                _value_tile_1x1(
                    y, at, 0, zeros, 0, a, source + i * a_stride, 0, low_at, VALUE_SHIFT, b, b_first, b_stride, steps
                )
