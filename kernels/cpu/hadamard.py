"""The Hadamard transform in compiled code: sums only, in the order of `kernels.quantized.hadamard`, not yet scaled."""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.simd import LANES, VECTOR, WORDS

_MOST_VECTORS = 16
"""Half of AVX-512's registers."""


def _transform(num_vectors: int) -> Any:
    """An intrinsic: the transform of 16 * `num_vectors` neighbours, all in registers."""

    @intrinsic
    def transform(typing: Any, values: Any, first: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer, at = args
            places = [simd.lanes_at(builder, pointer, at, LANES * n) for n in range(num_vectors)]
            vectors = [_transformed_lanes(builder, builder.load(place, align=4)) for place in places]
            distance = 1
            while distance < num_vectors:
                for n in range(num_vectors):
                    if not n & distance:
                        low, high = vectors[n], vectors[n + distance]
                        vectors[n], vectors[n + distance] = builder.fadd(low, high), builder.fsub(low, high)
                distance *= 2
            for place, vector in zip(places, vectors, strict=True):
                builder.store(vector, place, align=4)
            return context.get_dummy_value()

        return types.void(values, types.int64), emit

    return transform


def _transformed_lanes(builder: Any, value: Any) -> Any:
    distance = 1
    while distance < LANES:
        order = ir.Constant(WORDS, [n ^ distance for n in range(LANES)])
        signs = ir.Constant(VECTOR, [-1.0 if n & distance else 1.0 for n in range(LANES)])
        partner = builder.shuffle_vector(value, value, order)
        # Times 1 or -1 is exact, so this rounds once, as the sum or the difference does.
        value = builder.call(simd.fma_function(builder, VECTOR), [value, signs, partner])
        distance *= 2
    return value


_transform_1, _transform_4, _transform_16 = _transform(1), _transform(4), _transform(_MOST_VECTORS)


@compiled
def hadamard_in_place(values: Any, size: int, block: int) -> None:
    """`values` points to `size` fp32 values. Precondition: `block` is a power of two and divides `size`."""
    distance = 1
    if block >= _MOST_VECTORS * LANES:
        distance = _MOST_VECTORS * LANES
        for at in range(0, size, distance):
            _transform_16(values, at)
    elif block >= 4 * LANES:
        distance = 4 * LANES
        for at in range(0, size, distance):
            _transform_4(values, at)
    elif block >= LANES:
        distance = LANES
        for at in range(0, size, distance):
            _transform_1(values, at)
    while distance < block:
        for begin in range(0, size, 2 * distance):
            _add_and_subtract(values, begin, distance)
        distance *= 2


@compiled
def _add_and_subtract(values: Any, begin: int, distance: int) -> None:
    if distance < LANES:
        for i in range(begin, begin + distance):
            low, high = values[i], values[i + distance]
            values[i], values[i + distance] = low + high, low - high
        return
    for at in range(begin, begin + distance, LANES):
        low, high = simd.load(values, at), simd.load(values, at + distance)
        simd.store(values, at, simd.add(low, high))
        simd.store(values, at + distance, simd.subtract(low, high))
