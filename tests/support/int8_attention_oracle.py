"""The CPU backend's attention over INT8 KV for one query row, in NumPy: the arithmetic of `kernels.cpu.byte_attention`,
operation by operation, to be compared bit for bit."""

from dataclasses import dataclass

import numpy as np

TILE, PARTITION, LANES = 64, 256, 16
_QUERY_MAX = np.float32(16256)
_LOG2_E = np.float32(1.4426950408889634)
_EXP2 = [np.float32(c) for c in (0.0013381302, 0.009666368, 0.055503812, 0.2402235, 0.6931472, 1.0)]
_FULL_WEIGHT_BITS = 15

Floats = np.ndarray


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """The product is exact in 64 bits; that the sum is rounded twice shows in one case of half a billion."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def exp2(x: Floats) -> Floats:
    x = np.maximum(x, np.float32(-100))
    n = np.rint(x)
    r = x - n
    p = np.full_like(r, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = fma(p, r, np.full_like(r, coefficient))
    return np.ldexp(p, n.astype(np.int32))


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
    scores = (k.astype(np.int64) @ integers).astype(np.float32) * k_scale * (largest / _QUERY_MAX * _LOG2_E)
    total = Part(np.float32(-np.inf), np.float32(0), np.zeros(len(q), np.float32))
    for start in range(begin // PARTITION * PARTITION, end, PARTITION):
        part = Part(np.float32(-np.inf), np.zeros(LANES, np.float32), np.zeros(len(q), np.float32))
        for tile in range(start, min(start + PARTITION, end), TILE):
            seen = slice(max(tile, begin), min(tile + TILE, end))
            if seen.start < seen.stop:
                _join_tile(part, scores[seen], v[seen], v_scale[seen], seen.start - tile)
        _fold(total, part)
    return total.output / total.mass + np.float32(0)


def _join_tile(part: Part, scores: Floats, v: Floats, v_scale: Floats, offset: int) -> None:
    peak = max(part.peak, scores.max())
    shrinking = exp2(np.float32([part.peak - peak]))[0]
    part.peak = peak
    weights = exp2(scores - peak)
    lanes = np.zeros(TILE, np.float32)
    lanes[offset : offset + len(weights)] = weights
    part.mass = part.mass * shrinking
    for group in lanes.reshape(-1, LANES):
        part.mass = part.mass + group
    weighted = weights * v_scale
    exponent = max((int(weighted.max().view(np.int32)) + (1 << 7) >> 23) - 127, 16 - 127)
    integers = np.rint(np.ldexp(weighted, _FULL_WEIGHT_BITS - exponent)).astype(np.int64)
    assert integers.max() < 1 << 16
    product = (integers @ v.astype(np.int64)).astype(np.float32)
    step = np.full_like(product, np.ldexp(np.float32(1), exponent - _FULL_WEIGHT_BITS))
    part.output = fma(product, step, part.output * shrinking)


def _fold(total: Part, part: Part) -> None:
    lanes = part.mass
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    if lanes[0] == 0:
        return
    peak = max(total.peak, part.peak)
    old, new = exp2(np.float32([total.peak - peak, part.peak - peak]))
    total.peak = peak
    total.mass = fma(total.mass, old, lanes[0] * new)
    total.output = fma(total.output, old, part.output * new)
