"""A softmax's weights in 16-bit lanes, for some rows of a tile of scores at once.

`weigh_rows` is one intrinsic with two forms that give the same bits: the CPU's instructions, or plain LLVM IR. It works
on distances from the bound in 32nds and on weights of 15 bits:

    e = rint(start + score * slope); weights of e >= 2^15, and of NaN, are 0
    f = e mod 32 as Q0.16, n = e // 32
    w = (C0 - (f * (C1 - (f * (C2 - (f * C3 >> 16)) >> 16)) >> 16)) >> n; before the shift 2^(15 - f / 2^16) within 3
    W = (w * ratio + 2^14) >> 15

Packed order, of 64 positions: 0 to 3, 16 to 19, 32 to 35, 48 to 51; then 4 to 7 and so on, as the CPU packs them.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import intrinsic
from kernels.cpu.features import has_feature
from kernels.cpu.simd import F32, I8, I32, LANES, VECTOR, WORDS, index, lanes_at, splatted, words

DISTANCE_BITS = 5
"""Binary digits of a distance after the point: a rounded one is within 1.1 % of its weight, far less than what a score
owes to bytes of Q and K."""
WEIGHT_ONE = 32767
"""w of a distance of 0."""
C0, C1, C2, C3 = WEIGHT_ONE, 22652, 7553, 1286
"""Of least greatest relative error for the 32 values that f has: 1e-4."""
POWERS = tuple(
    C0 - (f * (C1 - (f * (C2 - (f * C3 >> 16)) >> 16)) >> 16) for f in range(0, 1 << 16, 1 << 16 - DISTANCE_BITS)
)
"""What w is before its shift, for each e mod 32; one instruction looks it up in a vector."""
_VECTORS = 4
_END = float(1 << 15)  # of distances
_ROUNDER = 0x4B400000  # bits of 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_I16 = ir.IntType(16)
_SHORTS = ir.VectorType(_I16, 2 * LANES)
_WIDE = ir.VectorType(I32, 2 * LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)

HAS_INSTRUCTIONS = has_feature("avx512bw")


def weigh_rows(*, by_instruction: bool = HAS_INSTRUCTIONS) -> Any:
    """An intrinsic that weighs `count` rows of 64 scores, `width` elements apart.

    Pointers, most with their first element: scores; per row a slope, a start and what w = 1 adds to the mass (fp32);
    the masses [count, 16] (fp32); POWERS and then 32 ones (uint16); the positions' ratios [64], at most 255, in packed
    order (uint16); where W [count, 64] goes, in packed order, `width` apart (uint8). Lane 4 q + 2 s + p of a mass
    grows by the w of positions 16 s + 4 q + 2 p and the next, and of those 32 after them (s and p are 0 or 1).
    """
    emit_rows = _Emitter(by_instruction).rows

    @intrinsic
    def weigh(
        typing: Any, count: Any, width: Any, scores: Any, scores_at: Any, slopes: Any, slopes_at: Any, starts: Any,
        starts_at: Any, units: Any, units_at: Any, mass: Any, mass_at: Any, table: Any, ratios: Any, ratios_at: Any,
        target: Any, target_at: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        signature = types.void(i, i, scores, i, slopes, i, starts, i, units, i, mass, i, table, ratios, i, target, i)
        return signature, lambda context, builder, signature, args: emit_rows(context, builder, *args)

    return weigh


@intrinsic
def write_ratios(typing: Any, a: Any, b: Any, c: Any, d: Any, target: Any) -> Any:
    """The nearest integers to 64 fp32 values, 0 to 2^15 - 1 -> target [64], uint16, in packed order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *vectors, target = args
        shorts = [_integers(builder, vector) for vector in vectors]
        for n in (0, 2):
            half = builder.bitcast(builder.gep(target, [index(LANES * n)]), _SHORTS.as_pointer())
            builder.store(_in_quarters(builder, *shorts[n : n + 2]), half, align=2)
        return context.get_dummy_value()

    return types.void(a, b, c, d, target), emit


class _Emitter:
    """Emits the operations in one of the two forms; of vectors of 16-bit lanes unless said otherwise."""

    def __init__(self, by_instruction: bool) -> None:
        self._by_instruction = by_instruction

    def rows(self, context: Any, builder: Any, count: Any, width: Any, *places: Any) -> Any:
        scores, slopes, starts, units, mass = (builder.gep(places[n], [places[n + 1]]) for n in range(0, 10, 2))
        table, ratios, target = places[10], builder.gep(places[11], [places[12]]), builder.gep(places[13], [places[14]])
        powers, ones, first, second = (
            _load_shorts(builder, pointer, 2 * LANES * n) for pointer in (table, ratios) for n in range(2)
        )
        with cgutils.for_range(builder, count) as loop:
            row, at = loop.index, builder.mul(loop.index, width)
            slope, start, unit = (
                splatted(builder, builder.load(builder.gep(pointer, [row]))) for pointer in (slopes, starts, units)
            )
            distances = []
            for n in range(_VECTORS):
                score = builder.load(lanes_at(builder, scores, at, LANES * n), align=4)
                distances.append(_fma(builder, score, slope, start))
            halves = [self._weights(builder, self._shorts(builder, *distances[n : n + 2]), powers) for n in (0, 2)]
            bytes_ = [self._multiply_rounded(builder, *pair) for pair in zip(halves, (first, second), strict=True)]
            to = builder.bitcast(builder.gep(target, [at]), _BYTES.as_pointer())
            builder.store(self._pack(builder, *bytes_), to, align=1)
            sums = builder.add(*(self._pair_sums(builder, weights, ones) for weights in halves))
            place = lanes_at(builder, mass, builder.mul(row, index(LANES)))
            grown = _fma(builder, builder.sitofp(sums, VECTOR), unit, builder.load(place, align=4))
            builder.store(grown, place, align=4)
        return context.get_dummy_value()

    def _weights(self, builder: Any, e: Any, powers: Any) -> Any:
        n = builder.lshr(e, _shorts(DISTANCE_BITS))
        if self._by_instruction:
            name = "llvm.x86.avx512.permvar.hi.512"  # looks at the lowest five bits of an index
            power = _call(builder, name, _SHORTS, [_SHORTS, _SHORTS], [powers, e])
            return _call(builder, "llvm.x86.avx512.psrlv.w.512", _SHORTS, [_SHORTS, _SHORTS], [power, n])
        f = builder.shl(e, _shorts(16 - DISTANCE_BITS))
        p = _shorts(C3)
        for c in (C2, C1, C0):
            p = builder.sub(_shorts(c), _high_product(builder, f, p))
        is_shift = builder.icmp_unsigned("<", n, _shorts(16))  # by more is not defined
        return builder.select(is_shift, builder.lshr(p, builder.and_(n, _shorts(15))), _shorts(0))

    def _shorts(self, builder: Any, a: Any, b: Any) -> Any:
        """fp32 -> nearest integers, in the order of `_in_quarters`; 2^15 for what is not below it."""
        if self._by_instruction:
            name, kinds = "llvm.x86.avx512.mask.cvtps2dq.512", [VECTOR, WORDS, _I16, I32]
            rest = [ir.Constant(WORDS, None), _I16(0xFFFF), I32(4)]  # all lanes; rounding as the thread's
            integers = [_call(builder, name, WORDS, kinds, [value, *rest]) for value in (a, b)]
            return _call(builder, "llvm.x86.avx512.packssdw.512", _SHORTS, [WORDS, WORDS], integers)
        end = splatted(builder, ir.Constant(F32, _END))
        limited = [builder.select(builder.fcmp_ordered("<", value, end), value, end) for value in (a, b)]
        return _in_quarters(builder, *(_integers(builder, value) for value in limited))

    def _multiply_rounded(self, builder: Any, a: Any, b: Any) -> Any:
        """(a * b + 2^14) >> 15, signed."""
        if self._by_instruction:
            return _call(builder, "llvm.x86.avx512.pmul.hr.sw.512", _SHORTS, [_SHORTS, _SHORTS], [a, b])
        product = builder.mul(builder.sext(a, _WIDE), builder.sext(b, _WIDE))
        rounded = builder.add(product, ir.Constant(_WIDE, [1 << 14] * (2 * LANES)))
        return builder.trunc(builder.ashr(rounded, ir.Constant(_WIDE, [15] * (2 * LANES))), _SHORTS)

    def _pair_sums(self, builder: Any, a: Any, ones: Any) -> Any:
        """Sixteen int32 sums of two neighbours."""
        if self._by_instruction:
            return _call(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, [_SHORTS, _SHORTS], [a, ones])
        wide = builder.zext(a, _WIDE)
        even, odd = (
            builder.shuffle_vector(wide, wide, ir.Constant(WORDS, list(range(first, 2 * LANES, 2)))) for first in (0, 1)
        )
        return builder.add(even, odd)

    def _pack(self, builder: Any, a: Any, b: Any) -> Any:
        """Values below 256 -> bytes, eight of a, eight of b in turn."""
        if self._by_instruction:
            return _call(builder, "llvm.x86.avx512.packuswb.512", _BYTES, [_SHORTS, _SHORTS], [a, b])
        kind = ir.VectorType(I8, 2 * LANES)
        return _in_quarters(builder, builder.trunc(a, kind), builder.trunc(b, kind))


def _integers(builder: Any, values: Any) -> Any:
    """The nearest integers to fp32 values from 0 to 2^16 - 1, ties to even, in 16 bits."""
    shifted = builder.fadd(values, builder.bitcast(words(_ROUNDER), VECTOR))
    return builder.trunc(builder.bitcast(shifted, WORDS), ir.VectorType(_I16, LANES))


def _in_quarters(builder: Any, a: Any, b: Any) -> Any:
    """A quarter of a, a quarter of b in turn."""
    size = a.type.count
    quarter, order = size // 4, list[int]()
    for begin in range(0, size, quarter):
        order += [*range(begin, begin + quarter), *range(size + begin, size + begin + quarter)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, 2 * size), order))


def _high_product(builder: Any, a: Any, b: Any) -> Any:
    """The upper half of the unsigned product."""
    product = builder.mul(builder.zext(a, _WIDE), builder.zext(b, _WIDE))
    return builder.trunc(builder.lshr(product, ir.Constant(_WIDE, [16] * (2 * LANES))), _SHORTS)


def _load_shorts(builder: Any, pointer: Any, at: int) -> Any:
    return builder.load(builder.bitcast(builder.gep(pointer, [index(at)]), _SHORTS.as_pointer()), align=2)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [VECTOR] * 3, [a, b, c])


def _call(builder: Any, name: str, result: Any, kinds: list[Any], args: list[Any]) -> Any:
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name), args)


def _shorts(value: int) -> Any:
    return ir.Constant(_SHORTS, [value] * (2 * LANES))
