"""The KV write of the reference and of the CPU kernels, bit for bit against an oracle in NumPy that shares no code."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from kernels.ops import Ops, select

CPU = torch.device("cpu")
SCALE_FLOOR = np.float32(2.0**-14)


@pytest.fixture(params=["reference", "cpu"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(CPU, request.param)


def poisoned(layout: KVLayout, num_blocks: int) -> KVCache:
    cache = KVCache(layout, num_blocks, CPU)
    cache.write_blocks(range(num_blocks), np.random.default_rng(0).bytes(num_blocks * layout.block_bytes))
    return cache


def oracle(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[..., D] fp32 -> values int8, scales fp16, and which vectors could not be represented."""
    with np.errstate(all="ignore"):
        magnitude = np.abs(vectors).max(axis=-1)
        scales = np.maximum(magnitude / np.float32(127), SCALE_FLOOR).astype(np.float16)
        bad = ~np.isfinite(vectors).all(axis=-1) | ~np.isfinite(scales)
        scales[bad] = SCALE_FLOOR
        values = np.rint(vectors / scales.astype(np.float32)[..., None])
        values[bad] = 0
    return np.clip(values, -127, 127).astype(np.int8), scales, bad


def check(ops: Ops, k: np.ndarray, v: np.ndarray, block_size: int = 16) -> None:
    """Writes k, v [T, H, D] to scattered slots; every byte of the pool must be as expected, written or not."""
    num_tokens, num_heads, head_dim = k.shape
    layout = KVLayout(KVFormat.INT8, block_size, 2, num_heads, head_dim)
    num_blocks = -(-num_tokens // block_size) + 1
    written, expected = poisoned(layout, num_blocks), poisoned(layout, num_blocks)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    nonfinite = torch.ones(num_tokens, dtype=torch.int32)
    ops.write_kv(torch.from_numpy(k), torch.from_numpy(v), written.layer(1), slots, nonfinite)
    layer = expected.layer(1)
    num_bad = np.ones(num_tokens, np.int32)
    for vectors, target, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        assert scales is not None
        values, wanted_scales, bad = oracle(vectors)
        assert values.min(initial=0) >= -127
        target[slots // block_size, :, slots % block_size] = torch.from_numpy(values)
        scales[slots // block_size, :, slots % block_size] = torch.from_numpy(wanted_scales)
        num_bad += bad.sum(axis=-1, dtype=np.int32)
    everything = range(num_blocks), num_blocks * block_size
    assert written.read_blocks(*everything) == expected.read_blocks(*everything)
    assert nonfinite.tolist() == num_bad.tolist()


vectors = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 16, 20, 64])))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(k=vectors)
def test_any_bits_of_fp32(ops: Ops, k: np.ndarray) -> None:
    check(ops, k, k[::-1].copy(), block_size=3)


def test_every_magnitude(ops: Ops) -> None:
    random = np.random.default_rng(2)
    k, v = (
        (random.standard_normal((500, 3, 64)) * 10.0 ** random.uniform(-45, 38, (500, 3, 1))).astype(np.float32)
        for _ in range(2)
    )
    check(ops, k, v)


def test_ties_go_to_the_even_integer_and_fp16_ties_to_the_even_scale(ops: Ops) -> None:
    halves = np.arange(-253, 254, 2, dtype=np.float32)  # odd numbers of halves, under a scale of 1
    values = np.concatenate([halves, np.float32([254.0] * 2)]) / 2
    check(ops, values.reshape(1, 1, -1), -values.reshape(1, 1, -1))
    between = np.float32(1 + 2.0**-11) + np.float32([0, 2.0**-10, 2.0**-9])  # half way between two fp16 numbers
    vectors = (between * np.float32(127))[:, None, None] * np.float32([1.0, 0.5, -0.25, 0.0])
    check(ops, vectors, -vectors)


@pytest.mark.parametrize(
    "special",
    [0.0, -0.0, 1e-45, 1.17e-38, 127 * 2.0**-14, 126.9 * 2.0**-14, 65504.0 * 127, 65519.9 * 127, 65520.0 * 127, 3.4e38,
     np.inf, -np.inf, np.nan],
)  # fmt: skip
def test_edges(ops: Ops, special: float) -> None:
    k = np.random.default_rng(3).standard_normal((4, 3, 64)).astype(np.float32)
    v = k[::-1].copy()
    k[1, 2, 63] = v[3, 0, 0] = special
    k[2] = special
    check(ops, k, v)


def test_unquantized_layers_take_the_numbers_as_they_are(ops: Ops) -> None:
    layout = KVLayout(KVFormat.FP32, 5, 2, 2, 20)
    cache = poisoned(layout, 2)
    k = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(4))
    v = -k
    k[1, 0, 3], v[1, 1, 19] = torch.nan, torch.inf
    slots = torch.tensor([9, 0, 4])
    nonfinite = torch.zeros(3, dtype=torch.int32)
    ops.write_kv(k, v, cache.layer(1), slots, nonfinite)
    k[1, 0], v[1, 1] = 0.0, 0.0
    assert cache.layer(1).k[slots // 5, :, slots % 5].equal(k)
    assert cache.layer(1).v[slots // 5, :, slots % 5].equal(v)
    assert nonfinite.tolist() == [0, 2, 0]


def test_a_slot_that_is_not_in_the_pool_is_named() -> None:
    ops = select(CPU, "cpu")
    cache = poisoned(KVLayout(KVFormat.INT8, 16, 1, 1, 16), 2)
    before = cache.read_blocks([0, 1], 32)
    with pytest.raises(IndexError, match="slot 32 of new token 1"):
        ops.write_kv(
            torch.ones(2, 1, 16), torch.ones(2, 1, 16), cache.layer(0), torch.tensor([3, 32]),
            torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip
    assert cache.read_blocks([0, 1], 32) == before
