"""The KV write, bit for bit: against the reference, and against a NumPy oracle that shares no code with either."""

import numpy as np
import pytest
import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from kernels.ops import Ops, select
from kernels.reference.ops import ReferenceOps

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
SMALLEST_SCALE = np.float16(2.0**-14)


@pytest.fixture
def ops() -> Ops:
    return select(CPU, "triton")


def poisoned_cache(layout: KVLayout, num_blocks: int) -> KVCache:
    cache = KVCache(layout, num_blocks, CPU)
    cache.write_blocks(range(num_blocks), np.random.default_rng(0).bytes(num_blocks * layout.block_bytes))
    return cache


def contents(cache: KVCache) -> bytes:
    return cache.read_blocks(range(cache.num_blocks), cache.num_blocks * cache.layout.block_size)


def oracle(vector: np.ndarray) -> tuple[np.ndarray, np.float16, bool]:
    """One vector [D] fp32 -> (int8 values, scale, whether it counts as not finite)."""
    zeros = np.zeros(vector.size, np.int8), SMALLEST_SCALE, True
    if not np.isfinite(vector).all():
        return zeros
    exact = np.float32(np.abs(vector).max()) / np.float32(127)
    with np.errstate(over="ignore"):
        scale = np.maximum(exact, np.float32(2.0**-14)).astype(np.float16)
    if np.isinf(scale):
        return zeros
    return np.clip(np.rint(vector / np.float32(scale)), -127, 127).astype(np.int8), scale, False


def vectors(num_tokens: int, num_heads: int, head_dim: int, seed: int) -> torch.Tensor:
    """Magnitudes from far below the smallest scale to near the largest; some vectors are zero, some entries tiny."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((num_tokens, num_heads, head_dim))
    values *= 10.0 ** random.uniform(-9, 5.5, (num_tokens, num_heads, 1))
    values[random.random(values.shape) < 0.05] = 1e-40
    values[0, 0] = 0.0
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize(
    ("block_size", "num_heads", "head_dim"), [(16, 3, 64), (3, 2, 20), (16, 1, 128)], ids=["3x64", "2x20", "1x128"]
)
def test_bytes_equal_the_reference_and_the_oracle(ops: Ops, block_size: int, num_heads: int, head_dim: int) -> None:
    layout = KVLayout(KVFormat.INT8, block_size, 2, num_heads, head_dim)
    written, expected = poisoned_cache(layout, 4), poisoned_cache(layout, 4)
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(1))[:9]
    qkv = vectors(9, 2 + 2 * num_heads, head_dim, seed=2)
    k, v = qkv[:, 2 : 2 + num_heads], qkv[:, 2 + num_heads :]  # not contiguous, as the model passes them
    nonfinite, expected_nonfinite = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    ops.write_kv(k, v, written.layer(1), slots, nonfinite)
    ReferenceOps().write_kv(k, v, expected.layer(1), slots, expected_nonfinite)
    assert contents(written) == contents(expected)
    assert nonfinite.tolist() == expected_nonfinite.tolist() == [0] * 9
    layer = written.layer(1)
    assert layer.k_scale is not None
    assert layer.v_scale is not None
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for values, out, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
            for head in range(num_heads):
                quantized, scale, _ = oracle(values[token, head].numpy())
                assert out[block, head, offset].numpy().tobytes() == quantized.tobytes()
                assert scales[block, head, offset].numpy().tobytes() == scale.tobytes()


def test_ties_go_to_the_even_integer(ops: Ops) -> None:
    """With a maximum of 127 * 2^-3 the scale is 2^-3 exactly, so multiples of 2^-4 are ties."""
    layout = KVLayout(KVFormat.INT8, 16, 1, 1, 16)
    cache = poisoned_cache(layout, 1)
    halves = np.array([-5, -3, -1, 0, 1, 3, 5, 7, 9, 249, 251, 253, -249, -251, -253, 254], np.float32)
    k = torch.from_numpy(halves * np.float32(2.0**-4)).view(1, 1, 16)
    ops.write_kv(k, -k, cache.layer(0), torch.tensor([5]), torch.zeros(1, dtype=torch.int32))
    expected = [-2, -2, 0, 0, 0, 2, 2, 4, 4, 124, 126, 126, -124, -126, -126, 127]
    assert cache.layer(0).k[0, 0, 5].tolist() == expected
    assert cache.layer(0).v[0, 0, 5].tolist() == [-q for q in expected]


LARGEST = float(np.nextafter(np.float32(65520.0 * 127), np.float32(0)))  # its scale rounds to 65504, fp16's largest


@pytest.mark.parametrize(
    ("value", "is_bad"),
    [(NAN, True), (-NAN, True), (INF, True), (-INF, True), (65520.0 * 127, True), (-3e38, True), (LARGEST, False)],
)
def test_a_vector_without_a_scale_is_zeros_and_counted(ops: Ops, value: float, is_bad: bool) -> None:
    layout = KVLayout(KVFormat.INT8, 16, 1, 3, 20)
    written, expected = poisoned_cache(layout, 1), poisoned_cache(layout, 1)
    k, v = vectors(3, 3, 20, seed=3), vectors(3, 3, 20, seed=4)
    k[1, 0, 7] = k[1, 2, 19] = v[1, 1, 0] = value
    v[2, 2, 3] = value
    slots = torch.tensor([9, 0, 15])
    nonfinite = torch.tensor([0, 10, 0], dtype=torch.int32)
    expected_nonfinite = nonfinite.clone()
    ops.write_kv(k, v, written.layer(0), slots, nonfinite)
    ReferenceOps().write_kv(k, v, expected.layer(0), slots, expected_nonfinite)
    assert contents(written) == contents(expected)
    assert nonfinite.tolist() == expected_nonfinite.tolist() == ([0, 13, 1] if is_bad else [0, 10, 0])
    quantized, scale, is_counted = oracle(k[1, 0].numpy())
    layer = written.layer(0)
    assert layer.k_scale is not None
    assert is_counted == is_bad
    assert layer.k[0, 0, 0].tolist() == quantized.tolist()
    assert layer.k_scale[0, 0, 0].item() == scale


def test_unquantized_layers_are_refused_by_name(ops: Ops) -> None:
    cache = KVCache(KVLayout(KVFormat.FP32, 16, 1, 1, 16), 1, CPU)
    one = torch.ones(1, 1, 16)
    with pytest.raises(ValueError, match=r"unquantized \(torch.float32\)"):
        ops.write_kv(one, one, cache.layer(0), torch.tensor([0]), torch.zeros(1, dtype=torch.int32))
