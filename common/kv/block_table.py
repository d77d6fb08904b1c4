"""Logical block -> block id, for one sequence or job."""

from dataclasses import dataclass, field

from common.ids import BlockHash, BlockId


@dataclass(slots=True)
class BlockTable:
    """Blocks [0, len(block_ids)) of one token stream.

    Blocks [0, num_hashed) are full, confirmed and named by `hashes[i]`; the rest are private to their owner.
    """

    block_ids: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_hashed(self) -> int:
        return len(self.hashes)

    def capacity_tokens(self, block_size: int) -> int:
        return len(self.block_ids) * block_size
