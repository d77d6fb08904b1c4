"""The prefix index in this process's memory: for one-process deployments and tests. Entries have no lease."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from common.ids import BlockHash
from common.prefix_index.base import Holder


class MemoryPrefixIndex:
    """Implements `PrefixIndex`. Always available."""

    def __init__(self) -> None:
        self._held: dict[Holder, set[BlockHash]] = {}

    async def publish(self, holder: Holder, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        held = self._held.setdefault(holder, set())
        held.difference_update(removed)
        held.update(stored)

    async def replace(self, holder: Holder, held: Iterable[BlockHash]) -> None:
        self._held[holder] = set(held)

    async def count(self, holder: Holder) -> int:
        return len(self._held.get(holder, ()))

    async def longest_prefix(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        lengths: dict[str, int] = {}
        for holder in holders:
            held = self._held.get(holder, set())
            lengths[holder.worker_id] = sum(1 for _ in takewhile(held.__contains__, hashes))
        return lengths

    async def forget(self, holder: Holder) -> None:
        self._held.pop(holder, None)

    async def close(self) -> None:
        """Nothing is kept open."""
