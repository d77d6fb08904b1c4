"""The index is a hint with a deadline."""

import asyncio
from collections.abc import Mapping, Sequence

from common.ids import BlockHash, Incarnation
from common.prefix_index.base import Holder, PrefixIndexUnavailable
from common.prefix_index.memory import MemoryPrefixIndex
from gateway.prefix_lookup import PAUSE_S, PrefixLookup

HOLDER = Holder("w", Incarnation(b"i"))
HASHES = [BlockHash(b"a"), BlockHash(b"b")]


class FlakyIndex(MemoryPrefixIndex):
    def __init__(self) -> None:
        super().__init__()
        self.mood = "well"
        self.num_asked = 0

    async def longest_prefix(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        self.num_asked += 1
        if self.mood == "away":
            raise PrefixIndexUnavailable("connection refused")
        if self.mood == "slow":
            await asyncio.Event().wait()
        return await super().longest_prefix(hashes, holders)


class Fixture:
    def __init__(self, timeout_s: float = 5.0) -> None:
        self.index = FlakyIndex()
        self.now_s = 100.0
        self.heard: list[bool] = []
        self.lookup = PrefixLookup(self.index, timeout_s, lambda: self.now_s, self.heard.append)

    async def ask(self) -> Mapping[str, int]:
        return await self.lookup.held_blocks(HASHES, [HOLDER])


async def test_what_is_held() -> None:
    fixture = Fixture()
    await fixture.index.publish(HOLDER, HASHES[:1], ())
    assert await fixture.ask() == {"w": 1}
    assert fixture.heard == [True]


async def test_away_is_left_alone_for_a_while() -> None:
    fixture = Fixture()
    fixture.index.mood = "away"
    assert await fixture.ask() == {}
    assert await fixture.ask() == {}
    assert (fixture.index.num_asked, fixture.heard) == (1, [False])
    fixture.now_s += PAUSE_S
    fixture.index.mood = "well"
    assert await fixture.ask() == {"w": 0}
    assert fixture.heard == [False, True]


async def test_slow_is_away() -> None:
    fixture = Fixture(timeout_s=0.001)
    fixture.index.mood = "slow"
    assert await fixture.ask() == {}
    assert fixture.heard == [False]


async def test_no_index_and_nothing_to_ask() -> None:
    fixture = Fixture()
    assert await fixture.lookup.held_blocks([], [HOLDER]) == {}
    assert await fixture.lookup.held_blocks(HASHES, []) == {}
    assert await PrefixLookup(None, 1.0, lambda: 0.0, fixture.heard.append).held_blocks(HASHES, [HOLDER]) == {}
    assert fixture.heard == []
