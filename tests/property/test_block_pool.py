"""The block pool against a slow, obvious model: reference counts, names, eviction order, promises, index changes."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import NoRoom
from common.ids import BlockHash, BlockId
from common.kv.block_pool import BlockPool

# Few names and small counts: collisions, promises and evictions are what this is about.
NAMES = [BlockHash(bytes([i]) * 16) for i in range(4)]
COUNTS = st.integers(0, 3) | st.integers(0, 7)


class BlockPoolMachine(RuleBasedStateMachine):
    """`owners` are the sequences: each holds one reference to each of its blocks."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.owners: list[list[BlockId]] = []
        self.free = [BlockId(i) for i in range(num_blocks)]  # the next to be taken first
        self.name_of: dict[BlockId, BlockHash] = {}
        self.num_reserved = 0
        self.indexed: set[BlockHash] = set()  # what an index knows that was told every change

    @property
    def num_available(self) -> int:
        return len(self.free) - self.num_reserved

    def block_of(self, name: BlockHash) -> BlockId | None:
        return next((block_id for block_id, own in self.name_of.items() if own == name), None)

    @rule(count=COUNTS, from_reserved=COUNTS, names=st.lists(st.sampled_from(NAMES), max_size=3))
    def allocate_and_fill(self, count: int, from_reserved: int, names: list[BlockHash]) -> None:
        from_reserved = min(from_reserved, count, self.num_reserved)
        if count - from_reserved > self.num_available:
            with pytest.raises(NoRoom):
                self.pool.allocate(count, from_reserved=from_reserved)
            return
        taken = self.pool.allocate(count, from_reserved=from_reserved)
        assert taken == self.free[:count], "unnamed ones go first, then the least recently freed"
        del self.free[:count]
        self.num_reserved -= from_reserved
        for block_id in taken:
            self.name_of.pop(block_id, None)
        self.owners.append(taken)
        for block_id, name in zip(taken, names, strict=False):
            self.register(block_id, name)

    @precondition(lambda self: self.name_of)
    @rule(data=st.data(), tail=st.permutations(NAMES))
    def touch_what_is_found(self, data: st.DataObject, tail: list[BlockHash]) -> None:
        head = data.draw(st.lists(st.sampled_from(sorted(self.name_of.values())), unique=True))
        chain = [*head, *(name for name in tail if name not in head)][: data.draw(st.integers(1, len(NAMES)))]
        expected: list[BlockId] = []
        for name in chain:
            block_id = self.block_of(name)
            if block_id is None:
                break
            expected.append(block_id)
        found = self.pool.lookup(chain)
        assert found == expected
        leaving = [block_id for block_id in found if block_id in self.free]
        assert self.pool.num_free_among(found) == len(leaving)
        if len(leaving) > self.num_available:
            with pytest.raises(NoRoom):
                self.pool.touch(found)
            return
        self.pool.touch(found)
        self.free = [block_id for block_id in self.free if block_id not in leaving]
        self.owners.append(found)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free_an_owner(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.give_back(owner)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def free_a_tail(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner]))
        tail = [owner.pop() for _ in range(data.draw(st.integers(1, len(owner))))]
        self.give_back(tail[::-1])

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        still_held = Counter(block_id for owner in self.owners for block_id in owner)
        freed = [block_id for block_id in reversed(block_ids) if not still_held[block_id]]
        assert self.pool.free(block_ids) == len(freed)
        for block_id in freed:
            self.free.insert(len(self.free) if block_id in self.name_of else 0, block_id)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def fill_a_block(self, data: st.DataObject, name: BlockHash) -> None:
        self.register(data.draw(st.sampled_from([block_id for owner in self.owners for block_id in owner])), name)

    def register(self, block_id: BlockId, name: BlockHash) -> None:
        self.pool.register(block_id, name)
        if self.block_of(name) is None:
            self.name_of.setdefault(block_id, name)

    @rule(count=COUNTS)
    def reserve(self, count: int) -> None:
        if count > self.num_available:
            with pytest.raises(NoRoom):
                self.pool.reserve(count)
            return
        self.pool.reserve(count)
        self.num_reserved += count

    @precondition(lambda self: self.num_reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.num_reserved))
        self.pool.unreserve(count)
        self.num_reserved -= count

    @precondition(lambda self: len(self.name_of) > 1)
    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.name_of.clear()

    @precondition(lambda self: self.indexed != set(self.name_of.values()))
    @rule()
    def tell_the_index(self) -> None:
        changes = self.pool.take_changes()
        assert bool(changes) == bool(changes.stored or changes.removed)
        stored, removed = set(changes.stored), set(changes.removed)
        assert len(stored) + len(removed) == len(changes.stored) + len(changes.removed)
        assert not stored & self.indexed, "what the index knows is not told again"
        assert removed <= self.indexed, "what the index never knew is not taken back"
        self.indexed = (self.indexed - removed) | stored
        assert self.indexed == set(self.pool.held_hashes())
        assert not self.pool.take_changes()

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check_integrity()
        assert sorted(self.pool.held_hashes()) == sorted(self.name_of.values())
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_in_use == self.num_blocks - len(self.free)
        assert self.pool.num_cached == sum(block_id in self.name_of for block_id in self.free)
        assert self.pool.num_reserved == self.num_reserved
        assert self.pool.num_available == self.num_available

    def teardown(self) -> None:
        """All given back: the pool is whole again, and an index that follows it agrees."""
        while self.owners:
            self.give_back(self.owners.pop())
        self.pool.unreserve(self.num_reserved)
        self.num_reserved = 0
        self.tell_the_index()
        self.accounts_agree()
        assert self.pool.num_available == self.num_blocks
        assert len(self.pool.allocate(self.num_blocks)) == self.num_blocks
        self.pool.check_integrity()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_changes_that_nobody_takes_stay_bounded() -> None:
    """A worker without an index runs for weeks."""
    pool = BlockPool(2)
    for number in range(1_000):
        block_ids = pool.allocate(1)
        pool.register(block_ids[0], BlockHash(number.to_bytes(16, "big")))
        pool.free(block_ids)
    changes = pool.take_changes()
    assert (len(changes.stored), len(changes.removed)) == (2, 0)


def test_a_block_freed_too_often_is_our_own_fault() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block_ids)


def test_an_error_of_the_accounts_names_the_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="block 0: 0 references, free: False"):
        pool.check_integrity()


def test_blocks_without_a_name_are_taken_before_any_cached_block() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.register(first, BlockHash(b"1" * 16))
    pool.register(third, BlockHash(b"3" * 16))
    pool.free([first, second, third])
    assert set(pool.allocate(2)) == {second, BlockId(3)}
    assert pool.num_cached == 2
    assert pool.allocate(1) == [third], "then the tail before the head"
