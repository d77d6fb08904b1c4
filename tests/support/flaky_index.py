"""A prefix index that can be away, forgets when told, and counts its calls."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from common.ids import BlockHash
from common.prefix_index.base import Holder, PrefixIndexUnavailable
from common.prefix_index.memory import MemoryPrefixIndex


class FlakyIndex:
    """A MemoryPrefixIndex, except while `is_down`."""

    def __init__(self) -> None:
        self.is_down = False
        self.calls: Counter[str] = Counter()
        self._inner = MemoryPrefixIndex()

    async def publish(self, holder: Holder, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        self._called("publish")
        await self._inner.publish(holder, stored, removed)

    async def replace(self, holder: Holder, held: Iterable[BlockHash]) -> None:
        self._called("replace")
        await self._inner.replace(holder, held)

    async def count(self, holder: Holder) -> int:
        self._called("count")
        return await self._inner.count(holder)

    async def longest_prefix(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        self._called("longest_prefix")
        return await self._inner.longest_prefix(hashes, holders)

    async def forget(self, holder: Holder) -> None:
        self._called("forget")
        await self._inner.forget(holder)

    async def close(self) -> None:
        self.calls["close"] += 1

    def lose_everything(self) -> None:
        self._inner = MemoryPrefixIndex()

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.is_down:
            raise PrefixIndexUnavailable("down, as the test wants it")
