"""Shuffles bytes of several positions into words of four: of one position, or of one dimension of four positions.

Both ways a word holds what is summed over, so that a sum of four products of bytes is one step of a dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import I8, I32, LANES, WORDS, index, lanes_at, words_at

CHUNK = 16
"""Dimensions that are shuffled at once, at least: the bytes of a quarter of a vector."""
WIDE = 64
_QUARTER = ir.VectorType(I8, CHUNK)


@intrinsic
def interleave_keys(
    typing: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Sixteen positions of 16 int8 values -> four groups of 16 positions of 4 values:
    target[g * target_stride + 4 * j + e] = source[j * source_stride + 4 * g + e].
    """
    i = types.int64
    return types.void(source, i, i, target, i, i), _emit_keys


def _emit_keys(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    source, source_at, source_stride, target, target_at, target_stride = args
    rows = []
    for j in range(LANES):
        at = builder.add(source_at, builder.mul(source_stride, index(j)))
        rows.append(builder.load(builder.bitcast(builder.gep(source, [at]), _QUARTER.as_pointer()), align=1))
    # quarter l of vector i is position 4 l + i; a 4 x 4 transposition within the quarters makes it dimensions 4 g ..
    vectors = [_joined(builder, [rows[4 * quarter + i] for quarter in range(4)]) for i in range(4)]
    for g, vector in enumerate(_transposed_quarters(builder, vectors, 4)):
        at = builder.add(target_at, builder.mul(target_stride, index(g)))
        builder.store(builder.bitcast(vector, WORDS), words_at(builder, target, at), align=1)
    return context.get_dummy_value()


@intrinsic
def store_dimensions(typing: Any, a: Any, b: Any, c: Any, d: Any, target: Any, target_at: Any) -> Any:
    """What `interleave_wide_values` does to dimensions, undone: 64 fp32 values, from an element on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *vectors, target, at = args
        low, high = ((0, 1), (2, 3))
        halves = [_quarters(builder, vectors[n], vectors[n + 1], half) for half in (low, high) for n in (0, 2)]
        for i in range(4):
            first = i // 2 * 2
            value = _quarters(builder, halves[first], halves[first + 1], (i % 2, i % 2 + 2))
            builder.store(value, lanes_at(builder, target, at, LANES * i), align=4)
        return context.get_dummy_value()

    return types.void(a, b, c, d, target, types.int64), emit


def _quarters(builder: Any, a: Any, b: Any, numbers: tuple[int, int]) -> Any:
    """Two quarters of a vector of sixteen, and the same two of another."""
    quarter = LANES // 4
    begins = [first + quarter * n for first in (0, LANES) for n in numbers]
    order = [begin + n for begin in begins for n in range(quarter)]
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, order))


def _transposed_quarters(builder: Any, rows: list[Any], size: int) -> list[Any]:
    """Four vectors of elements of `size` bytes -> four vectors of words of four elements (size 1), or of quarters of
    four elements (size 4); within each quarter, in order."""
    low = [_unpacked(builder, a, b, size, 0) for a, b in ((rows[0], rows[1]), (rows[2], rows[3]))]
    high = [_unpacked(builder, a, b, size, 1) for a, b in ((rows[0], rows[1]), (rows[2], rows[3]))]
    return [_unpacked(builder, a, b, 2 * size, half) for a, b in (low, high) for half in (0, 1)]


def _unpacked(builder: Any, a: Any, b: Any, size: int, half: int) -> Any:
    """Elements of `size` bytes of a and b in turn, from one half of each quarter."""
    num_bytes, order = a.type.count, []
    for quarter in range(0, num_bytes, CHUNK):
        begin = quarter + half * CHUNK // 2
        for at in range(begin, begin + CHUNK // 2, size):
            order += [*range(at, at + size), *range(num_bytes + at, num_bytes + at + size)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, num_bytes), order))


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _value_intrinsic(num_dims: int) -> Any:
    """An intrinsic: four positions of `num_dims` int8 values -> `num_dims` words of one dimension's four values.

    Word 4 * i + e of part j, of num_dims / 4 words each, is dimension 16 * i + 4 * j + e.
    """
    vector = ir.VectorType(I8, num_dims)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_at, source_stride, target, target_at = args
        rows = []
        for j in range(4):
            at = builder.add(source_at, builder.mul(source_stride, index(j)))
            rows.append(builder.load(builder.bitcast(builder.gep(source, [at]), vector.as_pointer()), align=1))
        for j, part in enumerate(_transposed_quarters(builder, rows, 1)):
            at = builder.gep(target, [builder.add(target_at, index(num_dims * j))])
            builder.store(part, builder.bitcast(at, vector.as_pointer()), align=1)
        return context.get_dummy_value()

    @intrinsic
    def interleave(typing: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any) -> Any:
        return types.void(source, types.int64, types.int64, target, types.int64), emit

    return interleave


interleave_wide_values = _value_intrinsic(WIDE)
interleave_values = _value_intrinsic(CHUNK)
