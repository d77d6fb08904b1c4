"""Widens stored values to fp32 lanes: int8 (or fp32, as they are) in order, int8 transposed."""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import I8, LANES, VECTOR, WORDS, index, lanes_at, words

WIDE = 64
"""Dimensions that `widen_transposed` takes at once: one vector of int8 words."""


@intrinsic
def widen(typing: Any, source: Any, source_at: Any, target: Any, target_at: Any) -> Any:
    """target[target_at : + 16] = source[source_at : + 16]; pointers, the source int8 or fp32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(args[0], [args[1]])
        if signature.args[0].dtype == types.int8:
            narrow = builder.load(builder.bitcast(pointer, ir.VectorType(I8, LANES).as_pointer()), align=1)
            value = builder.sitofp(narrow, VECTOR)
        else:
            value = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        builder.store(value, lanes_at(builder, args[2], args[3]), align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), emit


@intrinsic
def widen_transposed(
    typing: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Sixteen rows of 64 int8 values -> 64 rows of 16 fp32 values: target[d, j] = source[j, d].

    Offsets and strides are in elements. A vector holds a row as 16 words, and each word goes to four rows.
    """
    i = types.int64
    return types.void(source, i, i, target, i, i), _emit_widen_transposed


def _emit_widen_transposed(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    source, source_at, source_stride, target, target_at, target_stride = args
    rows = []
    for j in range(LANES):
        at = builder.add(source_at, builder.mul(source_stride, index(j)))
        rows.append(builder.load(builder.bitcast(builder.gep(source, [at]), WORDS.as_pointer()), align=1))
    columns = [lane for word in _transpose(builder, rows) for lane in _widened_bytes(builder, word)]
    for d, column in enumerate(columns):
        at = builder.add(target_at, builder.mul(target_stride, index(d)))
        builder.store(column, lanes_at(builder, target, at), align=4)
    return context.get_dummy_value()


def _widened_bytes(builder: Any, word_lanes: Any) -> list[Any]:
    """The four bytes of each little-endian word, as fp32: a shift up makes the byte's sign the word's."""
    raised = [builder.shl(word_lanes, words(24 - 8 * byte)) for byte in range(4)]
    return [builder.sitofp(builder.ashr(value, words(24)), VECTOR) for value in raised]


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words: in the round with distance s, rows i and i + s swap their off-diagonal s-wide squares."""
    distance = LANES // 2
    while distance:
        keep = [n if not n & distance else LANES + n - distance for n in range(LANES)]
        move = [n + distance if not n & distance else LANES + n for n in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                low, high = rows[i], rows[i + distance]
                rows[i] = builder.shuffle_vector(low, high, ir.Constant(WORDS, keep))
                rows[i + distance] = builder.shuffle_vector(low, high, ir.Constant(WORDS, move))
        distance //= 2
    return rows
