"""Products of rows of bytes with matrices of bytes: exact sums in int32, in any order.

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

BYTE_ROWS = 6  # 6 x 4 sums, 4 vectors of `b` and a factor fill AVX-512's registers
_MAX_COLUMNS = 4
_BYTES = ir.VectorType(I8, 4 * LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_WIDE_HALVES = ir.VectorType(I32, 2 * LANES)
_SIGN_BITS = 0x80808080
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


def byte_tile(rows: int, columns: int, *, is_b_raised: bool, add_fours: _AddFours = ADD_FOURS) -> Any:
    """An intrinsic of `rows` rows and `columns` vectors; for each row r and lane n, mod 2^32:
    y[r * y_stride + n] = start[r * start_stride] + sum over k of a[r, k] * b[k, n], b signed.

    Pointers, first elements and strides of y (int32), start (int32), a and b (bytes), and steps >= 1 of four k each.
    a[r, 4 * step : + 4] is a[a_at + r * a_stride + 4 * step : + 4]; b[4 * step : + 4, n] is
    b[b_at + step * b_stride + 4 * n : + 4]. `is_b_raised`: a is signed, and b counts as 128 more than it is, since the
    CPU multiplies signed by unsigned bytes only; otherwise a is unsigned.
    """

    @intrinsic
    def tile(
        typing: Any, y: Any, y_at: Any, y_stride: Any, start: Any, start_at: Any, start_stride: Any, a: Any, a_at: Any,
        a_stride: Any, b: Any, b_at: Any, b_stride: Any, steps: Any,
    ) -> Any:  # fmt: skip
        def dot(builder: Any, sums: Any, factor: Any, b_lanes: Any) -> Any:
            if not is_b_raised:
                return add_fours(builder, sums, factor, b_lanes)
            raised = builder.xor(builder.bitcast(b_lanes, WORDS), words(_SIGN_BITS))
            return add_fours(builder, sums, raised, factor)

        i = types.int64
        signature = types.void(y, i, i, start, i, i, a, i, i, b, i, i, i)
        return signature, lambda context, builder, signature, args: _emit(context, builder, args, rows, columns, dot)

    return tile


def _emit(context: Any, builder: Any, args: Any, rows: int, columns: int, dot: _AddFours) -> Any:
    y, y_at, y_stride, start, start_at, start_stride, a, a_at, a_stride, b, b_at, b_stride, steps = args
    places = [(r, c) for r in range(rows) for c in range(columns)]
    a_rows = [builder.add(a_at, builder.mul(a_stride, index(r))) for r in range(rows)]
    start_rows = [builder.add(start_at, builder.mul(start_stride, index(r))) for r in range(rows)]
    starts = [splatted_words(builder, builder.load(builder.gep(start, [at]))) for at in start_rows]

    before, loop, after = builder.block, builder.append_basic_block("steps"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    sums = {place: builder.phi(WORDS) for place in places}
    b_row = builder.add(b_at, builder.mul(step, b_stride))
    b_lanes = [_load_bytes(builder, b, builder.add(b_row, index(4 * LANES * c))) for c in range(columns)]
    depth = builder.mul(step, index(4))
    factors = [_splatted_four(builder, a, builder.add(row, depth)) for row in a_rows]
    results = {(r, c): dot(builder, sums[r, c], factors[r], b_lanes[c]) for r, c in places}
    step_next = builder.add(step, index(1))
    builder.cbranch(builder.icmp_signed("<", step_next, steps), loop, after)
    for phi, first, following in [(step, index(0), step_next), *((sums[p], starts[p[0]], results[p]) for p in places)]:
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)

    builder.position_at_end(after)
    for (r, c), total in results.items():
        at = builder.add(builder.add(y_at, builder.mul(y_stride, index(r))), index(LANES * c))
        builder.store(total, words_at(builder, y, at), align=4)
    return context.get_dummy_value()


def _load_bytes(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(pointer, [at]), WORDS.as_pointer()), align=1)


def _splatted_four(builder: Any, pointer: Any, at: Any) -> Any:
    four = builder.load(builder.bitcast(builder.gep(pointer, [at]), I32.as_pointer()), align=1)
    return splatted_words(builder, four)


_key_tiles = [byte_tile(rows, _MAX_COLUMNS, is_b_raised=True) for rows in (1, 2, 3, BYTE_ROWS)]
_key_tile_1, _key_tile_2, _key_tile_3, _key_tile_6 = _key_tiles
_value_tiles = [byte_tile(rows, _MAX_COLUMNS, is_b_raised=False) for rows in (1, 2, 3, BYTE_ROWS)]
_value_tile_1, _value_tile_2, _value_tile_3, _value_tile_6 = _value_tiles
_value_tile_1x1 = byte_tile(1, 1, is_b_raised=False)


@compiled
def rows_at_once(rows: int) -> int:
    """Of so many rows that are left, how many one tile takes."""
    return BYTE_ROWS if rows >= BYTE_ROWS else min(rows, 3)


@compiled
def key_product(
    rows: int, y: Any, y_at: int, y_stride: int, start: Any, start_at: int, start_stride: int, a: Any, a_at: int,
    a_stride: int, b: Any, steps: int,
) -> None:  # fmt: skip
    """y[rows, 64] = start + a @ (b + 128): a signed [rows, 4 * steps]; b signed [steps, 64, 4]."""
    stride, r = 4 * LANES * _MAX_COLUMNS, 0
    while r < rows:
        count = rows_at_once(rows - r)
        at, first, source = y_at + r * y_stride, start_at + r * start_stride, a_at + r * a_stride
        if count == BYTE_ROWS:
            _key_tile_6(y, at, y_stride, start, first, start_stride, a, source, a_stride, b, 0, stride, steps)
        elif count == 3:
            _key_tile_3(y, at, y_stride, start, first, start_stride, a, source, a_stride, b, 0, stride, steps)
        elif count == 2:
            _key_tile_2(y, at, y_stride, start, first, start_stride, a, source, a_stride, b, 0, stride, steps)
        else:
            _key_tile_1(y, at, y_stride, start, first, start_stride, a, source, a_stride, b, 0, stride, steps)
        r += count


@compiled
def value_product(
    rows: int, columns: int, y: Any, y_at: int, y_stride: int, zero: Any, a: Any, a_at: int, a_stride: int, b: Any,
    b_stride: int, steps: int,
) -> None:  # fmt: skip
    """y[rows, 16 * columns] = a @ b: a unsigned [rows, 4 * steps]; b signed, a step 4 * 16 * columns bytes of
    `b_stride`. `zero` is one int32."""
    r = 0
    while r < rows:
        count, source, done = rows_at_once(rows - r), a_at + r * a_stride, 0
        while columns - done >= _MAX_COLUMNS:
            at, b_at = y_at + r * y_stride + done * LANES, 4 * LANES * done
            if count == BYTE_ROWS:
                _value_tile_6(y, at, y_stride, zero, 0, 0, a, source, a_stride, b, b_at, b_stride, steps)
            elif count == 3:
                _value_tile_3(y, at, y_stride, zero, 0, 0, a, source, a_stride, b, b_at, b_stride, steps)
            elif count == 2:
                _value_tile_2(y, at, y_stride, zero, 0, 0, a, source, a_stride, b, b_at, b_stride, steps)
            else:
                _value_tile_1(y, at, y_stride, zero, 0, 0, a, source, a_stride, b, b_at, b_stride, steps)
            done += _MAX_COLUMNS
        for c in range(done, columns):
            for i in range(count):
                at, b_at = y_at + (r + i) * y_stride + c * LANES, 4 * LANES * c
                _value_tile_1x1(y, at, 0, zero, 0, 0, a, source + i * a_stride, 0, b, b_at, b_stride, steps)
        r += count
