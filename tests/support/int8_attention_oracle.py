"""The CPU backend's attention over INT8 KV for one query row, in NumPy: the arithmetic of `kernels.cpu.byte_attention`,
operation by operation, to be compared bit for bit."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tests.support.paged_kv import PagedKV

TILE, PARTITION, LANES = 64, 256, 16
_QUERY_MAX = np.float32(127)
_WEIGHT_MAX = np.float32(255)
_LOG2_E = np.float32(1.4426950408889634)
_WEIGHT_ONE = np.float32(32767)
_COEFFICIENTS = (32767, 22652, 7553, 1286)
_POWER = (0.0013381302, 0.0096663684, 0.055503812, 0.2402235, 0.6931472, 1.0)
_DISTANCE_ONE = np.float32(1 << 5)
_NO_WEIGHT = np.float32(1 << 15)

Floats = np.ndarray


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """The product is exact in 64 bits; that the sum is rounded twice shows in one case of half a billion."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def weights_of(scores: Floats, factor: Floats, bound: Floats) -> np.ndarray:
    """32767 * 2^(scores * factor - bound), nearly; int64."""
    distances = fma(scores, -factor * _DISTANCE_ONE, np.full_like(scores, bound * _DISTANCE_ONE))
    e = np.rint(np.where(distances < _NO_WEIGHT, distances, _NO_WEIGHT)).astype(np.int64)
    f, n = (e << 11) & 0xFFFF, e >> 5
    c0, c1, c2, c3 = _COEFFICIENTS
    return (c0 - (f * (c1 - (f * (c2 - (f * c3 >> 16)) >> 16)) >> 16)) >> n


def power_of_two(n: Floats) -> Floats:
    return np.ldexp(np.float32(1), int(max(n, np.float32(-100))))


def power(x: Floats) -> Floats:
    """2^x, nearly."""
    above = np.ceil(x)
    r = x - above + np.float32(0.5)
    p = np.float32(_POWER[0])
    for coefficient in _POWER[1:]:
        p = fma(p, r, np.float32(coefficient))
    return p * np.float32(0.5**0.5) * power_of_two(above)


@dataclass
class Part:
    """A partition's sums, or all partitions' so far."""

    peak: Floats
    mass: Floats
    output: Floats


def attend(
    q: Floats, k: Floats, k_scale: Floats, v: Floats, v_scale: Floats, scale: float, begin: int, end: int
) -> Floats:
    """q [D] fp32; k, v [end, D] int8; k_scale, v_scale [end] fp32; positions begin .. end are seen -> [D] fp32."""
    largest = max(np.abs(q).max() * np.float32(scale), np.float32(2.0**-100))
    integers = np.rint(q * np.float32(scale) * (_QUERY_MAX / largest)).astype(np.int64)
    scores = (k.astype(np.int64) @ integers).astype(np.float32) * k_scale
    factor = largest / _QUERY_MAX * _LOG2_E
    total = Part(np.float32(-np.inf), np.float32(0), np.zeros(len(q), np.float32))
    for start in range(begin // PARTITION * PARTITION, end, PARTITION):
        part = Part(np.float32(-np.inf), np.zeros(LANES, np.float32), np.zeros(len(q), np.float32))
        bounds = [*([0, 1] if start == 0 else [start]), *range(start + TILE, start + PARTITION + 1, TILE)]
        for span_begin, span_end in pairwise(bounds):
            seen = slice(max(span_begin, begin), min(span_end, end))
            if seen.start < seen.stop:
                _join_span(part, scores[seen], factor, v[seen], v_scale[seen], seen.start % TILE)
        _fold(total, part)
    return total.output * (np.float32(1) / total.mass) + np.float32(0)


def _join_span(part: Part, scores: Floats, factor: Floats, v: Floats, v_scale: Floats, offset: int) -> None:
    largest = scores.max() * factor
    bound = np.ceil(fma(np.abs(largest), np.float32(2.0**-23), largest) * _DISTANCE_ONE) / _DISTANCE_ONE
    peak = max(part.peak, np.ceil(bound))
    shrinking, raising = power_of_two(part.peak - peak), power(bound - peak)
    part.peak = peak
    weights = weights_of(scores, factor, bound)
    lanes = np.zeros(TILE, np.int64)
    lanes[offset : offset + len(weights)] = weights
    sums = lane_sums(lanes).astype(np.float32)
    part.mass = fma(sums, raising * (np.float32(1) / _WEIGHT_ONE), part.mass * shrinking)
    top = v_scale.max()
    ratios = np.rint(v_scale * (_WEIGHT_MAX / top)).astype(np.int64)
    integers = (weights * ratios + (1 << 14)) >> 15
    assert integers.max() < 1 << 8
    product = (integers @ v.astype(np.int64)).astype(np.float32)
    step = np.full_like(product, raising * (top / _WEIGHT_MAX))
    part.output = fma(product, step, part.output * shrinking)


def lane_sums(weights: np.ndarray) -> np.ndarray:
    """By lane of the mass: each is of two pairs of neighbours, 32 positions apart."""
    pairs = weights.reshape(2, 2, 4, 2, 2).sum(axis=-1)  # half, sixteen, quarter, pair
    return pairs.sum(axis=0).transpose(1, 0, 2).reshape(LANES)


def _fold(total: Part, part: Part) -> None:
    lanes = part.mass
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    if lanes[0] == 0:
        return
    peak = max(total.peak, part.peak)
    old, new = power_of_two(total.peak - peak), power_of_two(part.peak - peak)
    total.peak = peak
    total.mass = fma(total.mass, old, lanes[0] * new)
    total.output = fma(total.output, old, part.output * new)


def stored(paged: PagedKV, sequence: int, context_len: int, kv_head: int) -> list[Floats]:
    """K [n, D] int8, its scales [n] fp32, V, its scales."""
    slots = paged.slots(sequence, 0, context_len)
    blocks, offsets = slots // paged.block_size, slots % paged.block_size
    layer = paged.layer
    assert layer.k_scale is not None
    assert layer.v_scale is not None
    tensors = (layer.k, layer.k_scale.float(), layer.v, layer.v_scale.float())
    return [tensor[blocks, kv_head, offsets].numpy() for tensor in tensors]
