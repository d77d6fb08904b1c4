"""The CPU backend's attention over INT8 KV for one query row, in NumPy: the arithmetic of `kernels.cpu.byte_attention`,
operation by operation, to be compared bit for bit."""

from dataclasses import dataclass

import numpy as np

from tests.support.paged_kv import PagedKV

TILE, PARTITION, LANES = 64, 256, 16
_QUERY_MAX = np.float32(127)
_WEIGHT_MAX = np.float32(255)
_LOG2_E = np.float32(1.4426950408889634)
_WEIGHT = [np.float32(c) for c in (0.05500897, 0.24221106, 0.69328296, 1.0)]
_LEAST_EXPONENT = -64

Floats = np.ndarray


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """The product is exact in 64 bits; that the sum is rounded twice shows in one case of half a billion."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def weights_of(scores: Floats, factor: Floats, bound: Floats) -> Floats:
    """2^(scores * factor - bound), nearly."""
    n = np.rint(fma(scores, factor, -bound))
    r = fma(scores, factor, -bound - n)
    p = np.full_like(r, _WEIGHT[0])
    for coefficient in _WEIGHT[1:]:
        p = fma(p, r, np.full_like(r, coefficient))
    return np.where(n >= _LEAST_EXPONENT, np.ldexp(p, n.astype(np.int32)), np.float32(0))


def power_of_two(n: Floats) -> Floats:
    return np.ldexp(np.float32(1), int(max(n, np.float32(-100))))


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
        for tile in range(start, min(start + PARTITION, end), TILE):
            seen = slice(max(tile, begin), min(tile + TILE, end))
            if seen.start < seen.stop:
                _join_tile(part, scores[seen], factor, v[seen], v_scale[seen], seen.start - tile)
        _fold(total, part)
    return total.output / total.mass + np.float32(0)


def _join_tile(part: Part, scores: Floats, factor: Floats, v: Floats, v_scale: Floats, offset: int) -> None:
    bound = np.ceil(scores.max() * factor)
    peak = max(part.peak, bound)
    shrinking, raising = power_of_two(part.peak - peak), power_of_two(bound - peak)
    part.peak = peak
    weights = weights_of(scores, factor, bound)
    lanes = np.zeros(TILE, np.float32)
    lanes[offset : offset + len(weights)] = weights
    groups = lanes.reshape(-1, LANES)
    sums = (groups[0] + groups[1]) + (groups[2] + groups[3])
    part.mass = fma(sums, raising, part.mass * shrinking)
    top = v_scale.max()
    integers = np.rint(np.float64(weights) * np.float64(v_scale * (_WEIGHT_MAX / top))).astype(np.int64)
    assert integers.max() < 1 << 8
    product = (integers @ v.astype(np.int64)).astype(np.float32)
    step = np.full_like(product, raising * (top / _WEIGHT_MAX))
    part.output = fma(product, step, part.output * shrinking)


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
