"""The Hadamard transform in compiled code: sums only, in the order of `kernels.quantized.hadamard`, not yet scaled."""

from typing import Any

from llvmlite import ir

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.simd import LANES, VECTOR, WORDS


@intrinsic
def _hadamard_lanes(typing: Any, value: Any) -> Any:
    """The transform of sixteen lanes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        distance = 1
        while distance < LANES:
            order = ir.Constant(WORDS, [n ^ distance for n in range(LANES)])
            signs = ir.Constant(VECTOR, [-1.0 if n & distance else 1.0 for n in range(LANES)])
            partner = builder.shuffle_vector(value, value, order)
            # Times 1 or -1 is exact, so this rounds once, as the sum or the difference does.
            value = builder.call(simd.fma_function(builder, VECTOR), [value, signs, partner])
            distance *= 2
        return value

    return simd.lanes(simd.lanes), emit


@compiled
def hadamard_in_place(values: Any, size: int, block: int) -> None:
    """`values` points to `size` fp32 values. Precondition: `block` is a power of two and divides `size`."""
    distance = 1
    if block >= LANES:
        for at in range(0, size, LANES):
            simd.store(values, at, _hadamard_lanes(simd.load(values, at)))
        distance = LANES
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
