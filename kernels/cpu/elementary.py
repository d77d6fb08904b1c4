"""exp, the largest magnitude, and fp16 by bits (numba has no fp16 on the CPU)."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu import masks, simd
from kernels.cpu.compiling import compiled, intrinsic

_LOG2_E = np.float32(1.4426950216293335)
_LN2_HIGH = np.float32(0.693359375)  # few bits: n * _LN2_HIGH is exact
_LN2_LOW = np.float32(-0.00021219444170128554)
_ROUNDER = np.float32(3 << 22)  # adding it leaves the nearest integer in the low bits
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)
# (exp(r) - 1 - r) / r^2 on |r| < ln(2) / 2, interpolated at Chebyshev nodes: relative error of exp 1e-8
_C2, _C3, _C4 = np.float32(0.5), np.float32(0.16666576266288757), np.float32(0.04166655242443085)
_C5, _C6 = np.float32(0.00836323294788599), np.float32(0.0013926250394433737)
_ONE = np.float32(1.0)
_HALF, _ROOT_HALF = np.float32(0.5), np.float32(0.5**0.5)
# (2^r - 1) / r on |r| <= 1/2, interpolated at Chebyshev nodes: relative error of 2^x 3e-7
_B1, _B2, _B3 = np.float32(0.6931471824645996), np.float32(0.2402234971523285), np.float32(0.055503811687231064)
_B4, _B5 = np.float32(0.00966636836528778), np.float32(0.0013381302123889327)
_POWER_MIN = np.float32(-100.0)  # so that a weight times a power is no subnormal, which would be slow

INFINITY_BITS = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_FP16_TO_FP32 = np.float32(2.0**112)  # the difference of the exponents' biases


@compiled
def exp_lanes(x: Any) -> Any:
    """e^x of lanes, within 2 units in the last place; 0 below -87, e^88 above 88; NaN stays NaN."""
    given = x
    x = simd.smaller(simd.splat(_EXP_MAX), simd.larger(simd.splat(_EXP_MIN), x))
    shifted = simd.fma(x, simd.splat(_LOG2_E), simd.splat(_ROUNDER))
    n = simd.subtract(shifted, simd.splat(_ROUNDER))
    r = simd.fma(n, simd.splat(-_LN2_LOW), simd.fma(n, simd.splat(-_LN2_HIGH), x))
    p = simd.fma(simd.splat(_C6), r, simd.splat(_C5))
    p = simd.fma(p, r, simd.splat(_C4))
    p = simd.fma(p, r, simd.splat(_C3))
    p = simd.fma(p, r, simd.splat(_C2))
    p = simd.fma(p, r, simd.splat(_ONE))
    p = simd.fma(p, r, simd.splat(_ONE))
    return masks.zero_where_less(given, simd.splat(_EXP_MIN), simd.multiply(p, simd.power_of_two(shifted)))


@compiled
def exp_fp32(x: np.float32) -> np.float32:
    return simd.largest_lane(exp_lanes(simd.splat(x)))


@compiled
def quotient_lanes(x: Any, divisor: Any, reciprocal: Any) -> Any:
    """x / divisor of lanes, rounded once as a division is, in a third of its time.

    `reciprocal` is 1 / divisor, rounded once. The first quotient is within two units in the last place, the second
    within one, and from there one more step gives the nearest (Markstein's theorem), for remainders are exact.
    Precondition: divisor within 2^-100 .. 2^122, |x / divisor| < 2^8. Quotients below 2^-2 may be off in their last
    place, and are what rounds to no other integer than 0.
    """
    quotient = simd.multiply(x, reciprocal)
    negative = simd.subtract(simd.splat(np.float32(0.0)), divisor)
    quotient = simd.fma(simd.fma(negative, quotient, x), reciprocal, quotient)
    return simd.fma(simd.fma(negative, quotient, x), reciprocal, quotient)


@compiled
def silu_mul_lanes(gate: Any, other: Any) -> Any:
    """silu(gate) * other of lanes, each operation rounded."""
    below = simd.add(simd.splat(_ONE), exp_lanes(simd.subtract(simd.splat(np.float32(0.0)), gate)))
    return simd.multiply(simd.divide(gate, below), other)


@compiled
def power_lanes(x: Any) -> Any:
    """2^x of lanes, x at most 127, within 5 units in the last place; where the integer above x is below -100, as if it
    were -100; for NaN, NaN or anything. 2^(x + n) is 2^x times 2^n, bit for bit, for integers n: what x is to the
    integer above it goes through the same operations."""
    above = simd.round_up(x)
    r = simd.add(simd.subtract(x, above), simd.splat(_HALF))
    p = simd.fma(simd.splat(_B5), r, simd.splat(_B4))
    p = simd.fma(p, r, simd.splat(_B3))
    p = simd.fma(p, r, simd.splat(_B2))
    p = simd.fma(p, r, simd.splat(_B1))
    p = simd.fma(p, r, simd.splat(_ONE))
    return simd.multiply(simd.multiply(p, simd.splat(_ROOT_HALF)), integer_power_lanes(above))


@compiled
def integer_power_lanes(n: Any) -> Any:
    """2^n of lanes with integers, at most 127; 2^-100 from there down; for NaN, anything."""
    return simd.power_of_two(simd.add(simd.larger(simd.splat(_POWER_MIN), n), simd.splat(_ROUNDER)))


@compiled
def largest_magnitude_bits(values: Any, begin: int, size: int) -> np.int32:
    """Magnitudes order as their bits do, infinity above every number and NaN above infinity."""
    largest = np.int32(0)
    for i in range(begin, begin + size):
        largest = max(largest, np.int32(np.float32(values[i]).view(np.int32) & _MAGNITUDE))
    return largest


@compiled
def fp16_to_fp32(bits: np.uint16) -> np.float32:
    """Precondition: positive and finite. Exact, subnormals included."""
    return np.int32(np.int32(bits) << np.int32(13)).view(np.float32) * _FP16_TO_FP32


@intrinsic
def _load_shifted_halves(typing: Any, pointer: Any, at: Any) -> Any:
    """Sixteen lanes from a pointer to uint16: the bits of fp32 values, shifted right by 13."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves_type = ir.VectorType(ir.IntType(16), simd.LANES)
        source = builder.bitcast(builder.gep(args[0], [args[1]]), halves_type.as_pointer())
        bits = builder.shl(
            builder.zext(builder.load(source, align=2), simd.WORDS), ir.Constant(simd.WORDS, [13] * simd.LANES)
        )
        return builder.bitcast(bits, simd.VECTOR)

    return simd.lanes(pointer, types.int64), emit


@compiled
def fp16_lanes(halves: Any, at: int) -> Any:
    """The same of sixteen, from a pointer to their bits."""
    return simd.multiply(_load_shifted_halves(halves, at), simd.splat(_FP16_TO_FP32))


@compiled
def fp32_to_fp16(value: np.float32) -> np.uint16:
    """Nearest, ties to even. Precondition: 2^-14 <= value < 65520, so that the result is normal and finite."""
    bits = np.float32(value).view(np.int32)
    rounded = bits + np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))
    return np.uint16((rounded >> np.int32(13)) - np.int32(112 << 10))
