"""Sixteen fp32 lanes as a value in compiled code, and raw pointers to load them from.

LLVM splits the lanes for narrower machines. Orders of sums are written down and product-sums are explicit fused
multiply-adds, so a lane's rounding never depends on the optimizer. Pointers carry no reference counts (which would be
atomic operations at every call) and check no bounds: whoever passes an address keeps its owner alive.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from kernels.cpu.compiling import intrinsic

LANES = 16

F32 = ir.FloatType()
I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)


class LanesType(types.Type):  # type: ignore[misc]  # numba has no types
    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # numba has no types
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


def _pointer(element: Any) -> Any:
    """An intrinsic that reads an int64 address as a pointer to `element`s; index it like an array."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        result = types.CPointer(element)
        return result(types.int64), lambda context, builder, signature, args: builder.inttoptr(
            args[0], context.get_value_type(result)
        )

    return pointer


floats = _pointer(types.float32)
bytes_signed = _pointer(types.int8)
bytes_unsigned = _pointer(types.uint8)
halves = _pointer(types.uint16)  # the bits of fp16
ints32 = _pointer(types.int32)
ints64 = _pointer(types.int64)


@intrinsic
def ints64_at(typing: Any, pointer: Any, at: Any) -> Any:
    """An int64 pointer moved by `at` elements."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def load(typing: Any, pointer: Any, at: Any) -> Any:
    """Sixteen lanes from a fp32 pointer, `at` in elements."""
    return lanes(pointer, types.int64), lambda context, builder, signature, args: builder.load(
        lanes_at(builder, args[0], args[1]), align=4
    )


@intrinsic
def store(typing: Any, pointer: Any, at: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], lanes_at(builder, args[0], args[1]), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, lanes), emit


@intrinsic
def load_words(typing: Any, pointer: Any, at: Any) -> Any:
    """Sixteen lanes from an int32 pointer, converted to fp32, ties to even."""
    return lanes(pointer, types.int64), lambda context, builder, signature, args: builder.sitofp(
        builder.load(words_at(builder, args[0], args[1]), align=4), VECTOR
    )


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    return lanes(types.float32), lambda context, builder, signature, args: splatted(builder, args[0])


def _elementwise(emit: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        return lanes(lanes, lanes), lambda context, builder, signature, args: emit(builder, args[0], args[1])

    return operation


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


add = _elementwise(_sum)
subtract = _elementwise(lambda builder, a, b: builder.fsub(a, b))
multiply = _elementwise(lambda builder, a, b: builder.fmul(a, b))
divide = _elementwise(lambda builder, a, b: builder.fdiv(a, b))
larger = _elementwise(_larger)  # NaN in either: the second
smaller = _elementwise(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))  # as above


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; of lanes or of fp32 scalars."""
    kind, llvm_type = (lanes, VECTOR) if a is lanes else (types.float32, F32)
    return kind(kind, kind, kind), lambda context, builder, signature, args: builder.call(
        fma_function(builder, llvm_type), args
    )


@intrinsic
def power_of_two(typing: Any, shifted: Any) -> Any:
    """2^n for lanes that hold n + 1.5 * 2^23, -126 <= n <= 127: n sits in the low bits, and becomes the exponent."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n = builder.sub(builder.bitcast(args[0], WORDS), words(0x4B400000 - 127))
        return builder.bitcast(builder.shl(n, words(23)), VECTOR)

    return lanes(lanes), emit


@intrinsic
def times_power_of_two(typing: Any, value: Any, shifted: Any) -> Any:
    """value * 2^n for `shifted` as above, value within 1/2 .. 2, -125 <= n <= 0: n is added to the exponent."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raised = builder.shl(builder.bitcast(args[1], WORDS), words(23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], WORDS), raised), VECTOR)

    return lanes(lanes, lanes), emit


@intrinsic
def largest_lane(typing: Any, value: Any) -> Any:
    return types.float32(lanes), lambda context, builder, signature, args: _tree(builder, args[0], _larger)


@intrinsic
def largest_lanes(typing: Any, pointer: Any, at: Any) -> Any:
    """The largest lane of each of sixteen vectors, side by side in memory."""
    return lanes(pointer, types.int64), lambda context, builder, signature, args: _rows_reduced(
        builder, [builder.load(lanes_at(builder, args[0], args[1], LANES * n), align=4) for n in range(LANES)], _larger
    )


@intrinsic
def lane_sums(typing: Any, pointer: Any, at: Any) -> Any:
    """The sum of the lanes of each of sixteen vectors, side by side in memory; each as `sum_lanes`."""
    return lanes(pointer, types.int64), lambda context, builder, signature, args: _rows_reduced(
        builder, [builder.load(lanes_at(builder, args[0], args[1], LANES * n), align=4) for n in range(LANES)], _sum
    )


@intrinsic
def store_low_bytes(typing: Any, pointer: Any, at: Any, value: Any, flipped: Any) -> Any:
    """The lowest byte of each lane's bits, exclusive or `flipped`, to an 8-bit pointer."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, at, value, flipped = args
        bytes_type = ir.VectorType(I8, LANES)
        bits = builder.xor(builder.bitcast(value, WORDS), splatted_words(builder, builder.trunc(flipped, I32)))
        target = builder.bitcast(builder.gep(pointer, [at]), bytes_type.as_pointer())
        builder.store(builder.trunc(bits, bytes_type), target, align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, lanes, types.int64), emit


@intrinsic
def magnitude(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.and_(builder.bitcast(args[0], WORDS), words(0x7FFFFFFF)), VECTOR)

    return lanes(lanes), emit


@intrinsic
def round_up(typing: Any, value: Any) -> Any:
    """To integers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ceil.v{LANES}f32")
        return builder.call(function, args)

    return lanes(lanes), emit


@intrinsic
def sum_lanes(typing: Any, value: Any) -> Any:
    """Halves are added to halves, down to one lane."""
    return types.float32(lanes), lambda context, builder, signature, args: _tree(builder, args[0], _sum)


@intrinsic
def take_next(typing: Any, counter: Any) -> Any:
    """Atomically counter[0] += 1 for an int64 pointer; returns the value before."""
    return types.int64(counter), lambda context, builder, signature, args: builder.atomic_rmw(
        "add", args[0], index(1), "monotonic"
    )


@intrinsic
def fetch_line(typing: Any, address: Any) -> Any:
    """Asks for the cache line at an address, to be read soon; the address need not be readable."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def keep_alive(typing: Any, array: Any) -> Any:
    """Does nothing, later than everything before it: an array whose address is in use must not be freed sooner."""
    return types.void(array), lambda context, builder, signature, args: context.get_dummy_value()


def _tree(builder: Any, value: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    distance = LANES // 2
    while distance:
        order = ir.Constant(WORDS, [n ^ distance for n in range(LANES)])
        value = combine(builder, value, builder.shuffle_vector(value, value, order))
        distance //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


def _rows_reduced(builder: Any, rows: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Lane n: all lanes of rows[n], combined as a tree, the lower lane first."""
    distance = LANES // 2
    while distance:
        low = [n if not n & distance else LANES + n - distance for n in range(LANES)]
        high = [n + distance if not n & distance else LANES + n for n in range(LANES)]
        orders = [ir.Constant(WORDS, order) for order in (low, high)]
        pairs = list(zip(rows[:distance], rows[distance:], strict=True))
        rows = [combine(builder, *(builder.shuffle_vector(a, b, order) for order in orders)) for a, b in pairs]
        distance //= 2
    return rows[0]


def fma_function(builder: Any, llvm_type: Any) -> Any:
    suffix = f"v{LANES}f32" if llvm_type is VECTOR else "f32"
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(llvm_type, [llvm_type] * 3), f"llvm.fma.{suffix}"
    )


def lanes_at(builder: Any, pointer: Any, at: Any, offset: int = 0) -> Any:
    return builder.bitcast(builder.gep(pointer, [builder.add(at, index(offset))]), VECTOR.as_pointer())


def words_at(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), WORDS.as_pointer())


def splatted(builder: Any, scalar: Any) -> Any:
    return _splatted(builder, scalar, VECTOR)


def splatted_words(builder: Any, scalar: Any) -> Any:
    return _splatted(builder, scalar, WORDS)


def _splatted(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, words(0))


def words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


def index(value: int) -> Any:
    return ir.Constant(I64, value)
