"""The pool's bytes: what goes in comes out, views address the documented offsets, and no owner's tail leaks."""

import numpy as np
import pytest
import torch

from common.kv.cache import KVCache
from common.kv.layout import SCALE_BYTES, KVFormat, KVLayout

CPU = torch.device("cpu")
NUM_BLOCKS = 5
LAYOUTS = [
    KVLayout(KVFormat.INT8, block_size=16, num_layers=2, num_kv_heads=3, head_dim=64),
    KVLayout(KVFormat.INT8, block_size=3, num_layers=3, num_kv_heads=2, head_dim=5),  # with padding
    KVLayout(KVFormat.FP32, block_size=4, num_layers=2, num_kv_heads=2, head_dim=8),
    KVLayout(KVFormat.FP32, block_size=3, num_layers=2, num_kv_heads=1, head_dim=5),  # with padding
]


def random_bytes(layout: KVLayout, num_blocks: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_blocks * layout.block_bytes)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.describe())
def layout(request: pytest.FixtureRequest) -> KVLayout:
    chosen = request.param
    assert isinstance(chosen, KVLayout)
    return chosen


@pytest.fixture
def cache(layout: KVLayout) -> KVCache:
    return KVCache(layout, NUM_BLOCKS, CPU)


@pytest.mark.parametrize("block_ids", [[0], [4], [3, 1], [4, 0, 2, 1, 3]])
def test_blocks_come_back_byte_for_byte(cache: KVCache, block_ids: list[int]) -> None:
    payload = random_bytes(cache.layout, len(block_ids))
    cache.write_blocks(block_ids, memoryview(payload))
    assert cache.read_blocks(block_ids, len(block_ids) * cache.layout.block_size) == payload


@pytest.mark.parametrize("num_valid", [0, 1, 4, 5, 100])
def test_parts_of_a_view_have_the_lengths_of_whole_blocks(cache: KVCache, num_valid: int) -> None:
    cache.write_blocks([3, 1], random_bytes(cache.layout, 2))
    parts = cache.view_blocks([3, 1], num_valid)
    assert [len(part) for part in parts] == [cache.layout.block_bytes] * 2, "bytes, whatever the view's shape"
    assert b"".join(parts) == cache.read_blocks([3, 1], num_valid)


def test_other_blocks_are_not_touched(cache: KVCache) -> None:
    everything = random_bytes(cache.layout, NUM_BLOCKS)
    cache.write_blocks(range(NUM_BLOCKS), everything)
    size = cache.layout.block_bytes
    replaced = random_bytes(cache.layout, 2, seed=1)
    cache.write_blocks([3, 1], replaced)
    expected = [everything[i * size : (i + 1) * size] for i in range(NUM_BLOCKS)]
    expected[3], expected[1] = replaced[:size], replaced[size:]
    assert cache.read_blocks(range(NUM_BLOCKS), NUM_BLOCKS * cache.layout.block_size) == b"".join(expected)


def test_what_was_read_is_a_copy(cache: KVCache) -> None:
    before = random_bytes(cache.layout, 1)
    cache.write_blocks([0], before)
    read = cache.read_blocks([0], cache.layout.block_size)
    cache.write_blocks([0], random_bytes(cache.layout, 1, seed=1))
    assert read == before


def test_views_address_the_documented_offsets(cache: KVCache) -> None:
    """Every element of every view is found again in the block's bytes, at the place that the layout names."""
    layout = cache.layout
    payload = random_bytes(layout, NUM_BLOCKS)
    cache.write_blocks(range(NUM_BLOCKS), payload)
    element = np.dtype(np.int8 if layout.format is KVFormat.INT8 else np.float32)
    for layer in range(layout.num_layers):
        view = cache.layer(layer)
        assert view.block_size == layout.block_size
        assert view.is_quantized == layout.format.has_scales
        for block_id in range(NUM_BLOCKS):
            for head in range(layout.num_kv_heads):
                region = block_id * layout.block_bytes + layer * layout.layer_bytes + head * layout.head_bytes
                for tensor, offset in ((view.k, layout.k_offset), (view.v, layout.v_offset)):
                    count = layout.block_size * layout.head_dim
                    expected = np.frombuffer(payload, element, count, region + offset)
                    assert tensor[block_id, head].numpy().tobytes() == expected.tobytes()
                for scale, offset in ((view.k_scale, layout.k_scale_offset), (view.v_scale, layout.v_scale_offset)):
                    if scale is not None:
                        start = region + offset
                        raw = payload[start : start + layout.block_size * SCALE_BYTES]
                        assert scale[block_id, head].numpy().tobytes() == raw


def test_views_write_into_the_pool(cache: KVCache) -> None:
    layout = cache.layout
    view = cache.layer(layout.num_layers - 1)
    view.k[2, 0, 1, 3] = 7
    block = cache.read_blocks([2], layout.block_size)
    element = layout.format.element_bytes
    offset = (layout.num_layers - 1) * layout.layer_bytes + (layout.head_dim + 3) * element
    dtype = np.int8 if layout.format is KVFormat.INT8 else np.float32
    assert np.frombuffer(block, dtype, 1, offset)[0] == 7
    assert block[:offset] + block[offset + element :] == bytes(layout.block_bytes - element)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_positions_past_the_valid_ones_are_zeroed_in_the_copy_alone(cache: KVCache, num_blocks: int) -> None:
    layout = cache.layout
    block_ids = [3, 1, 4][:num_blocks]
    payload = random_bytes(layout, num_blocks)
    cache.write_blocks(block_ids, payload)
    for num_valid in range(num_blocks * layout.block_size + 1):
        other = KVCache(layout, num_blocks, CPU)
        other.write_blocks(range(num_blocks), cache.read_blocks(block_ids, num_valid))
        for layer in range(layout.num_layers):
            source, copy = cache.layer(layer), other.layer(layer)
            for ours, theirs in (
                (source.k, copy.k),
                (source.v, copy.v),
                (source.k_scale, copy.k_scale),
                (source.v_scale, copy.v_scale),
            ):
                if ours is not None and theirs is not None:
                    assert_same_up_to(ours[block_ids], theirs, num_valid)
    assert cache.read_blocks(block_ids, num_blocks * layout.block_size) == payload


def assert_same_up_to(source: torch.Tensor, copy: torch.Tensor, num_valid: int) -> None:
    """[N, H, B, ...]: equal bits in positions [0, num_valid) of the N blocks together, zero bits after them."""
    positions = source.transpose(1, 2).flatten(0, 1), copy.transpose(1, 2).flatten(0, 1)
    assert positions[0][:num_valid].numpy().tobytes() == positions[1][:num_valid].numpy().tobytes()
    assert not any(positions[1][num_valid:].numpy().tobytes())


def test_a_new_pool_is_all_zeros(cache: KVCache) -> None:
    assert cache.read_blocks(range(NUM_BLOCKS), NUM_BLOCKS * cache.layout.block_size) == bytes(
        NUM_BLOCKS * cache.layout.block_bytes
    )
