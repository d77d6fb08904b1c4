"""Sampling noise as a function of (seed, output position, token id): no stream of draws, no state.

Each (seed, position) names one SplitMix64 stream (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; finalizer: Stafford's variant 13), and the token id is the index into it. Output n of SplitMix64 is a mix
of `start + (n + 1) * gamma`, so any token's noise is computed without its neighbours'.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_UNIFORM_BITS: Final = 52  # so that (n + 1/2) / 2**52 is exact in fp64, and never 0 or 1


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of `token_ids` [N] -> [N] fp64: -log(-log(u)), u uniform in (0, 1).

    0 <= seed < 2**64, 0 <= position < 2**63. The noise of one token id does not depend on the others asked for.
    """
    uniform = _uniform(random_bits(seed, position, token_ids))
    return -np.log(-np.log(uniform))


def random_bits(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random bits for each of `token_ids` [N] -> [N]."""
    of_seed = splitmix64(np.array([seed], dtype=np.uint64), np.array([0]))
    of_position = splitmix64(of_seed, np.array([position]))
    return splitmix64(of_position, token_ids)


def splitmix64(start: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Outputs number `index` [N] (from 0) of the generator whose state starts at `start` [1]; modulo 2**64."""
    z = start + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Midpoints of 2**52 equal parts of (0, 1)."""
    part = bits >> np.uint64(64 - _UNIFORM_BITS)
    return (part.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
