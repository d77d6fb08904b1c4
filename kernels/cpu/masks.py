"""Lanes of one value or another, by a comparison or by their place."""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import F32, LANES, VECTOR, WORDS, lanes, splatted, splatted_words


@intrinsic
def zero_where_less(typing: Any, a: Any, b: Any, value: Any) -> Any:
    """`value`, but 0 in lanes where a < b."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), ir.Constant(VECTOR, None), args[2])

    return lanes(lanes, lanes, lanes), emit


@intrinsic
def choose_where_less(typing: Any, a: Any, b: Any, value: Any, other: Any) -> Any:
    """`value` in lanes where a < b, else `other`."""
    return lanes(lanes, lanes, lanes, lanes), lambda context, builder, signature, args: builder.select(
        builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3]
    )


@intrinsic
def choose_where_zero(typing: Any, a: Any, value: Any, other: Any) -> Any:
    """`value` in lanes where a is 0, else `other`."""
    return lanes(lanes, lanes, lanes), lambda context, builder, signature, args: builder.select(
        builder.fcmp_ordered("==", args[0], ir.Constant(VECTOR, None)), args[1], args[2]
    )


@intrinsic
def keep_between(typing: Any, value: Any, other: Any, begin: Any, end: Any) -> Any:
    """Lanes begin .. end - 1 of `value`, the rest of `other`; int32 bounds may lie outside the lanes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, other, begin, end = args
        order = ir.Constant(WORDS, list(range(LANES)))
        is_past_begin = builder.icmp_signed(">=", order, splatted_words(builder, begin))
        is_before_end = builder.icmp_signed("<", order, splatted_words(builder, end))
        return builder.select(builder.and_(is_past_begin, is_before_end), value, other)

    return lanes(lanes, lanes, types.int32, types.int32), emit


@intrinsic
def nan_unless_less(typing: Any, a: Any, b: Any, value: Any) -> Any:
    """`value` in lanes where a < b, else NaN."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nan = splatted(builder, ir.Constant(F32, float("nan")))
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], nan)

    return lanes(lanes, lanes, lanes), emit
