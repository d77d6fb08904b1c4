"""Random values that are a function of (seed, name): the same on every machine, version and in every order of calls."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def words(seed: int, name: str, count: int) -> NDArray[np.uint64]:
    """`count` values of 32 bits. Fewer values of the same name are the beginning of more."""
    stream = hashlib.shake_256(f"twostroke/replay/{seed}/{name}".encode()).digest(4 * count)
    return np.frombuffer(stream, dtype="<u4").astype(np.uint64)


def uniforms(seed: int, name: str, count: int) -> list[float]:
    """`count` values in [0, 1)."""
    return [int(word) / 2**32 for word in words(seed, name, count)]


def integer(uniform: float, low: int, high: int) -> int:
    """`uniform` in [0, 1) spread over low..high, both included."""
    return low + int(uniform * (high - low + 1))


def weighted(uniform: float, weights: Sequence[float]) -> int:
    """The index that `uniform` in [0, 1) falls to. Needs a weight above zero, and chooses none of zero."""
    point = uniform * sum(weights)
    chosen = 0
    for index, weight in enumerate(weights):
        if weight > 0:
            chosen = index
            if point < weight:
                return index
            point -= weight
    return chosen  # rounding left a rest
