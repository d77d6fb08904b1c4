"""Blocks of an unquantized pool, sent quantized: the very bytes that decode would have written for the same K and V."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.kv.quantizing import QuantizingSource, narrower_sources
from kernels.ops import Ops, select

CPU = torch.device("cpu")
NUM_BLOCKS = 5


def written(layout: KVLayout, ops: Ops, k: np.ndarray, v: np.ndarray, slots: list[int]) -> KVCache:
    """A pool with traces of earlier owners, and k, v [layers, T, H, D] in the slots."""
    cache = KVCache(layout, NUM_BLOCKS, CPU)
    for layer in range(layout.num_layers):
        view = cache.layer(layer)
        for tensor in (view.k, view.v, view.k_scale, view.v_scale):
            if tensor is not None:
                tensor.fill_(7)
        nonfinite = torch.zeros(len(slots), dtype=torch.int32)
        vectors = torch.from_numpy(k[layer]), torch.from_numpy(v[layer])
        ops.write_kv(*vectors, cache.layer(layer), torch.tensor(slots), nonfinite)
    return cache


def check(ops: Ops, k: np.ndarray, v: np.ndarray, block_size: int, block_ids: list[int]) -> None:
    num_layers, num_tokens, num_heads, head_dim = k.shape
    wide = KVLayout(KVFormat.FP32, block_size, num_layers, num_heads, head_dim)
    narrow = replace(wide, format=KVFormat.INT8)
    slots = [block_ids[n // block_size] * block_size + n % block_size for n in range(num_tokens)]
    source = QuantizingSource(written(wide, ops, k, v, slots))
    assert source.layout == narrow
    own = written(narrow, ops, k, v, slots)
    used = block_ids[: narrow.num_blocks(num_tokens)]
    assert b"".join(source.view_blocks(used, num_tokens)) == own.read_blocks(used, num_tokens)
    for index, block_id in enumerate(used):
        num_valid = num_tokens - index * block_size
        assert b"".join(source.view_blocks([block_id], num_valid)) == own.read_blocks([block_id], num_valid)


vectors = hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 9), st.integers(1, 2), st.sampled_from([1, 20])))


@settings(max_examples=40, deadline=None)
@given(k=vectors, order=st.permutations(range(NUM_BLOCKS)))
def test_any_bits_of_fp32(k: np.ndarray, order: list[int]) -> None:
    check(select(CPU, "reference"), k, k[::-1].copy(), 3, order)


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_magnitude_in_real_shapes(backend: str, num_tokens: int) -> None:
    chance = np.random.default_rng(num_tokens)
    shape = (2, num_tokens, 3, 64)
    k, v = (
        (chance.standard_normal(shape) * 10.0 ** chance.uniform(-45, 38, (2, num_tokens, 3, 1))).astype(np.float32)
        for _ in range(2)
    )
    check(select(CPU, backend), k, v, 16, [4, 0, 2])


def test_a_quantized_pool_has_nothing_narrower() -> None:
    layout = KVLayout(KVFormat.INT8, 16, 1, 1, 16)
    assert narrower_sources(KVCache(layout, 1, CPU)) == {}
    assert set(narrower_sources(KVCache(replace(layout, format=KVFormat.FP32), 1, CPU))) == {KVFormat.INT8}


def test_blocks_can_be_sent_as_their_own_or_a_narrower_format_and_as_nothing_else() -> None:
    base = KVLayout(KVFormat.FP32, 16, 2, 3, 64)
    others = [base, replace(base, block_size=32), replace(base, num_layers=3), replace(base, num_kv_heads=1)]
    for changed, sent, wanted in product(others, KVFormat, KVFormat):
        is_allowed = changed == base and (sent is wanted or sent is KVFormat.FP32)
        assert replace(base, format=sent).can_be_sent_as(replace(changed, format=wanted)) == is_allowed
