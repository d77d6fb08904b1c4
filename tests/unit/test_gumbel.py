"""The sampling noise: known answers of its generator, fixed values of its own, and its distribution."""

import math

import numpy as np
import pytest

from common.model.gumbel import gumbel_noise, random_bits, splitmix64

LARGEST_SEED = 2**64 - 1


def test_generator_gives_the_published_sequence() -> None:
    """The first outputs of SplitMix64 from state 1234567, as its reference implementation prints them."""
    outputs = splitmix64(np.array([1234567], dtype=np.uint64), np.arange(5))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, [2558736989570252433, 17913671590881668180, 4045813962736552049, 14726135625726115545]),
        (1, 0, [12793040940332582595, 17925934194126948328, 12897787843864065866, 4695153387903010692]),
        (0, 1, [3391245575278488096, 11530943515112887734, 3368500943593529764, 723204984142348312]),
        (42, 7, [146974938868952004, 1720429349099035730, 4028060394066864562, 17403002717002145582]),
        (2**63, 2**31 - 1, [8991869516496843209, 9287774763832283591, 5530559409810338938, 15874814322909590303]),
        (2**64 - 1, 1, [9644260768662178987, 1210388844802916046, 4594848455966309677, 10723015356863058975]),
    ],
)
def test_bits_of_fixed_keys_never_change(seed: int, position: int, expected: list[int]) -> None:
    """A change here changes the answer to every seeded request."""
    assert random_bits(seed, position, np.array([0, 1, 49151, 2**31 - 1])).tolist() == expected


def test_noise_is_the_double_logarithm_of_the_top_52_bits() -> None:
    token_ids = np.arange(1000)
    bits = random_bits(5, 9, token_ids).tolist()
    expected = [-math.log(-math.log(((b >> 12) + 0.5) / 2**52)) for b in bits]
    # Two logarithms, each within one unit of the last place of fp64; the outer one's argument is at least 1e-16.
    np.testing.assert_allclose(gumbel_noise(5, 9, token_ids), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_extreme_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.model.gumbel.random_bits", lambda *_: np.array([bits], dtype=np.uint64))
    assert np.isfinite(gumbel_noise(0, 0, np.array([0]))).all()


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    everything = gumbel_noise(LARGEST_SEED, 3, np.arange(49152))
    for token_ids in (np.array([0]), np.array([49151]), np.array([7, 1000, 1001]), np.arange(13, 49152, 17)):
        assert np.array_equal(gumbel_noise(LARGEST_SEED, 3, token_ids), everything[token_ids])


def test_noise_has_the_mean_and_variance_of_the_gumbel_distribution() -> None:
    noise = np.concatenate([gumbel_noise(seed, 0, np.arange(50_000)) for seed in range(20)])
    standard_error = math.pi / math.sqrt(6 * noise.size)
    assert abs(noise.mean() - np.euler_gamma) < 4 * standard_error
    # Excess kurtosis 2.4: the variance's relative standard error is sqrt((2.4 + 2) / n).
    assert abs(noise.var() / (math.pi**2 / 6) - 1) < 4 * math.sqrt(4.4 / noise.size)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbouring_keys_are_uncorrelated(axis: str) -> None:
    """Correlation of the noise of key and key + 1, in each part of the key; fixed keys, so a fixed figure."""
    token_ids = np.arange(100_000)
    here = gumbel_noise(1000, 20, token_ids)
    there = {
        "seed": lambda: gumbel_noise(1001, 20, token_ids),
        "position": lambda: gumbel_noise(1000, 21, token_ids),
        "token": lambda: gumbel_noise(1000, 20, token_ids + 1),
    }[axis]()
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(token_ids.size)


def test_different_keys_give_different_noise() -> None:
    """Seeds that differ in one bit, the highest too, and swapped (seed, position) pairs."""
    keys = [(0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (2**32, 0), (0, 2**32), (2**63, 0), (LARGEST_SEED, 0)]
    assert len({random_bits(seed, position, np.arange(4)).tobytes() for seed, position in keys}) == len(keys)
