"""Shuffles bytes of several positions into words of four: of one position, or of one dimension of four positions.

Both ways a word holds what is summed over, so that a sum of four products of bytes is one step of a dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import I8, I32, LANES, WORDS, index, words, words_at

CHUNK = 16
"""Dimensions that are shuffled at once, at least: the bytes of a quarter of a vector."""
WIDE = 64
_QUARTER = ir.VectorType(I8, CHUNK)
_SIGN_BITS = 0x80808080


@intrinsic
def interleave_keys(
    typing: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Sixteen positions of 16 int8 values -> four groups of 16 positions of 4 unsigned values, 128 higher:
    target[g * target_stride + 4 * j + e] = source[j * source_stride + 4 * g + e] + 128.
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
    flipped = ir.Constant(WORDS, [_SIGN_BITS] * LANES)
    for g, vector in enumerate(_transposed_quarters(builder, vectors, 4)):
        at = builder.add(target_at, builder.mul(target_stride, index(g)))
        unsigned = builder.xor(builder.bitcast(vector, WORDS), flipped)
        builder.store(unsigned, words_at(builder, target, at), align=1)
    return context.get_dummy_value()


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


@intrinsic
def pack_bytes(typing: Any, a: Any, b: Any, c: Any, d: Any, target: Any, target_at: Any) -> Any:
    """The lowest bytes of four vectors' lanes -> target[target_at : + 64]: four lanes of a, the same of b, of c and
    of d; then the next four."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *vectors, target, target_at = args
        low = [builder.and_(builder.bitcast(vector, WORDS), words(0xFF)) for vector in vectors]
        bytes_ = [builder.bitcast(vector, ir.VectorType(I8, 4 * LANES)) for vector in low]
        first, second = (_in_turn(builder, *bytes_[i : i + 2], step=4, run=4) for i in (0, 2))
        packed = _in_turn(builder, first, second, step=1, run=8)
        builder.store(packed, builder.bitcast(builder.gep(target, [target_at]), packed.type.as_pointer()), align=1)
        return context.get_dummy_value()

    i = types.int64
    return types.void(a, b, c, d, target, i), emit


def _in_turn(builder: Any, a: Any, b: Any, *, step: int, run: int) -> Any:
    """Runs of `run` elements, each `step` after the one before, of a and b in turn."""
    size: int = a.type.count
    order: list[int] = []
    for begin in range(0, size, step * run):
        for first in (begin, size + begin):
            order += range(first, first + step * run, step)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))
