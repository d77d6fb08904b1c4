"""Sums of u8·s8 products for a few rows and panels, all in registers: one emitter, for the instructions of each CPU.

Sums are int32 and wrap around, so they are exact whenever the wanted sum fits in 32 bits, in any order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import I8, I32, I64, LANES, WORDS, index

LINE = 64  # bytes of one panel for four inputs: 16 outputs of 4 bytes each
_WORD = 4
_I1 = ir.IntType(1)


class DotUnit(NamedTuple):
    """Emitters: of sums that are zero, of four inputs for all outputs (from a pointer), of sums + weights · inputs,
    and of 16 int32 from sums."""

    zero: Any
    inputs: Callable[[Any, Any], Any]
    weights: Callable[[Any, Any], Any]
    add_products: Callable[[Any, Any, Any, Any], Any]
    total: Callable[[Any, Any], Any]


class Shape(NamedTuple):
    rows: int
    panels: int
    splits: int  # sums of their own for each of so many neighbouring words, where one chain of additions is too slow
    unroll: int  # words (four inputs) in one turn of the loop; divides 16
    ahead: int  # bytes by which weights are fetched before they are used; 0: not


def dot_tile(shape: Shape, unit: DotUnit) -> Any:
    """An intrinsic: sums[r, p, n] = sum over k of rows[r, k] * panels[p, k // 4, n, k % 4], mod 2^32.

    Arguments: rows (uint8 pointer), their stride in bytes, how many there are; panels (int8 pointer), the stride in
    bytes, how many; depth (a positive multiple of 64); sums (int32 pointer, [shape.rows, shape.panels, 16]). Where
    there are fewer rows or panels than the shape's, the last one stands in for those missing.
    """

    @intrinsic
    def tile(
        typing: Any, rows: Any, row_stride: Any, num_rows: Any, panels: Any, panel_stride: Any, num_panels: Any,
        depth: Any, sums: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        return types.void(rows, i, i, panels, i, i, i, sums), lambda context, builder, signature, args: _emit(
            context, builder, args, shape, unit
        )

    return tile


def _emit(context: Any, builder: Any, args: Any, shape: Shape, unit: DotUnit) -> Any:
    rows, row_stride, num_rows, panels, panel_stride, num_panels, depth, sums = args
    row_starts = clamped(builder, rows, row_stride, num_rows, shape.rows)
    panel_starts = clamped(builder, panels, panel_stride, num_panels, shape.panels)
    places = [(r, p, s) for r in range(shape.rows) for p in range(shape.panels) for s in range(shape.splits)]

    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    phis = {place: builder.phi(unit.zero.type) for place in places}
    running = dict(phis)
    panel_at = builder.mul(k, index(LINE // _WORD))
    for word in range(shape.unroll):
        _emit_word(builder, word, (k, panel_at), (row_starts, panel_starts), running, shape, unit)
    k_next = builder.add(k, index(_WORD * shape.unroll))
    builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
    for phi, start, step in [(k, index(0), k_next), *((phis[p], unit.zero, running[p]) for p in places)]:
        phi.add_incoming(start, before)
        phi.add_incoming(step, loop)

    builder.position_at_end(after)
    for r in range(shape.rows):
        for p in range(shape.panels):
            total = running[r, p, 0]
            for s in range(1, shape.splits):
                total = builder.add(total, running[r, p, s])
            at = builder.gep(sums, [index((r * shape.panels + p) * LANES)])
            builder.store(unit.total(builder, total), builder.bitcast(at, WORDS.as_pointer()), align=4)
    return context.get_dummy_value()


def _emit_word(builder: Any, word: int, at: Any, starts: Any, running: Any, shape: Shape, unit: DotUnit) -> None:
    (k, panel_at), (row_starts, panel_starts) = at, starts
    weights = []
    for start in panel_starts:
        line = builder.gep(builder.gep(start, [panel_at]), [index(LINE * word)])
        if shape.ahead:
            prefetch(builder, builder.gep(line, [index(shape.ahead)]))
        weights.append(unit.weights(builder, line))
    for r, start in enumerate(row_starts):
        inputs = unit.inputs(builder, builder.gep(builder.gep(start, [k]), [index(_WORD * word)]))
        for p, line_weights in enumerate(weights):
            place = (r, p, word % shape.splits)
            running[place] = unit.add_products(builder, running[place], inputs, line_weights)


def clamped(builder: Any, start: Any, stride: Any, count: Any, size: int) -> list[Any]:
    """Pointers to the first `size` of `count`; the last one again for those beyond."""
    last = builder.sub(count, index(1))
    numbers = [
        builder.select(builder.icmp_signed("<", index(i), last), index(i), last) if i else index(0) for i in range(size)
    ]
    return [builder.gep(start, [builder.mul(number, stride)]) for number in numbers]


def prefetch(builder: Any, pointer: Any) -> None:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32]), "llvm.prefetch.p0"
    )
    builder.call(function, [pointer, I32(0), I32(3), I32(1)])


def _vnni_add_products(builder: Any, sums: Any, inputs: Any, weights: Any) -> Any:
    # This is the form of LLVM 20 and older; newer ones read it too, and make theirs of it.
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(WORDS, [WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
    )
    return builder.call(function, [sums, inputs, weights])


def _splatted_word(builder: Any, pointer: Any) -> Any:
    word = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=1)
    single = builder.insert_element(ir.Constant(WORDS, ir.Undefined), word, I32(0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))


VNNI = DotUnit(
    zero=ir.Constant(WORDS, None),
    inputs=_splatted_word,
    weights=lambda builder, pointer: builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=1),
    add_products=_vnni_add_products,
    total=lambda builder, sums: sums,
)

_LINE_BYTES = ir.VectorType(I8, LINE)
_LINE_PRODUCTS = ir.VectorType(I32, LINE)
_HALF_SUMS = ir.VectorType(I32, LINE // 2)


def _plain_add_products(builder: Any, sums: Any, inputs: Any, weights: Any) -> Any:
    """Sums of two neighbouring products: what x86 does in one instruction, of 16-bit values, without loss."""
    products = builder.mul(inputs, weights)
    return builder.add(sums, _sum_of_neighbours(builder, products))


def _sum_of_neighbours(builder: Any, values: Any) -> Any:
    half = values.type.count // 2
    even, odd = (
        builder.shuffle_vector(
            values, values, ir.Constant(ir.VectorType(I32, half), [2 * i + first for i in range(half)])
        )
        for first in (0, 1)
    )
    return builder.add(even, odd)


PLAIN = DotUnit(
    zero=ir.Constant(_HALF_SUMS, None),
    inputs=lambda builder, pointer: builder.zext(
        builder.bitcast(_splatted_word(builder, pointer), _LINE_BYTES), _LINE_PRODUCTS
    ),
    weights=lambda builder, pointer: builder.sext(
        builder.load(builder.bitcast(pointer, _LINE_BYTES.as_pointer()), align=1), _LINE_PRODUCTS
    ),
    add_products=_plain_add_products,
    total=_sum_of_neighbours,
)
