"""Blocks of an unquantized pool, read in the quantized format of the worker that they are sent to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from kernels.reference.ops import quantize


class BlockSource(Protocol):
    """Where blocks to send are read. A KVCache is one, of its own layout."""

    layout: KVLayout  # of the bytes that are read

    def view_blocks(self, block_ids: Sequence[int], num_valid_tokens: int) -> list[memoryview]:
        """As `KVCache.view_blocks`."""


class QuantizingSource:
    """The bytes that a worker with an int8 pool would have written for the same K and V, by the same quantizer."""

    def __init__(self, cache: KVCache) -> None:
        self.layout = replace(cache.layout, format=KVFormat.INT8)
        assert cache.layout.can_be_sent_as(self.layout)
        self._cache = cache

    def view_blocks(self, block_ids: Sequence[int], num_valid_tokens: int) -> list[memoryview]:
        num_blocks = len(block_ids)
        narrow = KVCache(self.layout, num_blocks, self._cache.device)
        chosen = torch.tensor(block_ids, device=self._cache.device)
        for index in range(self.layout.num_layers):
            wide, layer = self._cache.layer(index), narrow.layer(index)
            for source, values, scales in ((wide.k, layer.k, layer.k_scale), (wide.v, layer.v, layer.v_scale)):
                assert scales is not None
                quantized, scale, _ = quantize(source[chosen])
                values.copy_(quantized)
                scales.copy_(scale)
        return narrow.view_blocks(range(num_blocks), num_valid_tokens)


def narrower_sources(cache: KVCache) -> dict[KVFormat, BlockSource]:
    """What `cache`'s blocks can be sent as, beside their own format."""
    return {KVFormat.INT8: QuantizingSource(cache)} if cache.layout.format is KVFormat.FP32 else {}
