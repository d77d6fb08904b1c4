"""Loops over rows of a tile, written out, so that what all of them share stays in the CPU's registers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import F32, LANES, VECTOR, fma_function, index, lanes_at, splatted, words_at

_VECTORS = 4


@intrinsic
def score_rows(typing: Any, count: Any, words: Any, at: Any, scales: Any, tops: Any) -> Any:
    """`words` [count, 64] int32, from element `at` on, become fp32 scores: times `scales` [64]. tops [count, 16] fp32:
    by lane, the largest of the row's four vectors. Pointers; a NaN is never larger."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, words, at, scales, tops = args
        factors = [builder.load(lanes_at(builder, scales, index(LANES * n)), align=4) for n in range(_VECTORS)]
        with cgutils.for_range(builder, count) as loop:
            first = builder.add(at, builder.mul(loop.index, index(_VECTORS * LANES)))
            top = splatted(builder, ir.Constant(F32, float("-inf")))
            for n, factor in enumerate(factors):
                place = words_at(builder, words, builder.add(first, index(LANES * n)))
                score = builder.fmul(builder.sitofp(builder.load(place, align=4), VECTOR), factor)
                builder.store(score, builder.bitcast(place, VECTOR.as_pointer()), align=4)
                top = builder.select(builder.fcmp_ordered(">", score, top), score, top)
            builder.store(top, lanes_at(builder, tops, builder.mul(loop.index, index(LANES))), align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, words, i, scales, tops), emit


@intrinsic
def add_rows(typing: Any, count: Any, products: Any, factors: Any, factors_at: Any, output: Any, output_at: Any) -> Any:
    """output [count, 64] fp32, from an element on: each row grows by the row of `products` [count, 64] int32, times its
    factor, rounded once. Pointers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, products, factors, factors_at, output, output_at = args
        factors = builder.gep(factors, [factors_at])
        with cgutils.for_range(builder, count) as loop:
            factor = splatted(builder, builder.load(builder.gep(factors, [loop.index])))
            first = builder.mul(loop.index, index(_VECTORS * LANES))
            for n in range(_VECTORS):
                at = builder.add(first, index(LANES * n))
                product = builder.sitofp(builder.load(words_at(builder, products, at), align=4), VECTOR)
                place = lanes_at(builder, output, builder.add(output_at, at))
                fma = fma_function(builder, VECTOR)
                builder.store(builder.call(fma, [product, factor, builder.load(place, align=4)]), place, align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, products, factors, i, output, i), emit
