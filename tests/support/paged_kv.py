"""Paged KV for kernel tests: sequences in shuffled blocks of a pool whose every other byte is poison."""

from collections.abc import Sequence

import numpy as np
import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from kernels.batch import AttentionBatch, KVLayerView
from kernels.reference.ops import ReferenceOps

UNREAD_BLOCK_ID = 1 << 30
"""Fills block tables past a sequence's blocks: whoever follows it leaves the pool."""


class PagedKV:
    """The INT8 KV of one layer for sequences of up to `capacities[s]` positions; fresh slots have NaN scales."""

    def __init__(self, num_kv_heads: int, head_dim: int, block_size: int, capacities: Sequence[int], seed: int) -> None:
        layout = KVLayout(KVFormat.INT8, block_size, 2, num_kv_heads, head_dim)
        counts = [layout.num_blocks(capacity) for capacity in capacities]
        random = np.random.default_rng(seed)
        cache = KVCache(layout, sum(counts) + 2, torch.device("cpu"))
        cache.write_blocks(range(cache.num_blocks), random.bytes(cache.num_blocks * layout.block_bytes))
        self.layer: KVLayerView = cache.layer(1)
        for scales in (self.layer.k_scale, self.layer.v_scale):
            assert scales is not None
            scales.fill_(torch.nan)
        shuffled = iter(random.permutation(cache.num_blocks))
        self.tables = [[int(next(shuffled)) for _ in range(count)] for count in counts]
        self.block_size = block_size

    def slots(self, sequence: int, start: int, end: int) -> torch.Tensor:
        """Slots of positions start .. end - 1."""
        table, size = self.tables[sequence], self.block_size
        return torch.tensor([table[p // size] * size + p % size for p in range(start, end)], dtype=torch.int64)

    def write(self, sequence: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k, v [positions, H, D] from position `start` on, by the reference."""
        nonfinite = torch.zeros(k.shape[0], dtype=torch.int32)
        ReferenceOps().write_kv(k, v, self.layer, self.slots(sequence, start, start + k.shape[0]), nonfinite)
        assert not nonfinite.any()

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        """Each of `rows` is (sequence, context length, query length)."""
        used = [-(-context_len // self.block_size) for _, context_len, _ in rows]
        tables = torch.full((len(rows), max(used) + 1), UNREAD_BLOCK_ID, dtype=torch.int32)
        for index, (sequence, _, _) in enumerate(rows):
            tables[index, : used[index]] = torch.tensor(self.tables[sequence][: used[index]], dtype=torch.int32)
        query_lens = [query_len for _, _, query_len in rows]
        return AttentionBatch(
            query_start=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
            context_lens=torch.tensor([context_len for _, context_len, _ in rows], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat([self.slots(s, length - new, length) for s, length, new in rows]),
            max_query_len=max(query_lens),
            max_context_len=max(context_len for _, context_len, _ in rows),
        )
