"""Accounts of a worker's blocks: free, cached, in use; reference counts; prefix reuse. Pure Python, single owner.

A block is in use (references > 0), or free. A free block that still has a name is *cached*: it can be found by its
hash and touched again until it is evicted. Free blocks without a name are taken first, then cached ones, the least
recently freed first.

Reservations are promises against the free count: `num_available = free - reserved`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.errors import NoRoom
from common.ids import BlockHash, BlockId


@dataclass(slots=True)
class IndexChanges:
    """What the prefix index should learn: names that became or ceased to be held here."""

    stored: list[BlockHash] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}
        self._num_cached = 0
        self._num_reserved = 0
        # Since the last `take_changes`: together never more than two pools' worth, even where nobody ever takes them.
        self._stored: dict[BlockHash, None] = {}  # held now, and not at the last call
        self._removed: dict[BlockHash, None] = {}  # held at the last call, and not now

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by their name."""
        return self._num_cached

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_available(self) -> int:
        """Blocks that may be allocated without breaking a promise."""
        return len(self._free) - self._num_reserved

    def lookup(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Ids of the longest leading run of `hashes` that is held here. Touches nothing."""
        found: list[BlockId] = []
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """How many of `block_ids` would leave the free list when touched."""
        return sum(1 for block_id in block_ids if block_id in self._free)

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each; a cached block leaves the free list.

        Raises NoRoom, changing nothing, when that would break a promise.
        """
        if self.num_free_among(block_ids) > self.num_available:
            raise NoRoom(f"{len(block_ids)} cached blocks wanted, {self.num_available} available of {self.num_blocks}")
        for block_id in block_ids:
            if block_id in self._free:
                del self._free[block_id]
                self._num_cached -= block_id in self._hash_of
            self._references[block_id] += 1

    def allocate(self, count: int, *, from_reserved: int = 0) -> list[BlockId]:
        """`count` blocks with one reference each; cached ones are evicted when no others are left.

        `from_reserved` of them redeem promises. Raises NoRoom, changing nothing, when the rest do not fit.
        """
        assert 0 <= from_reserved <= min(count, self._num_reserved)
        if count - from_reserved > self.num_available:
            raise NoRoom(f"{count} blocks wanted, {self.num_available} available of {self.num_blocks}")
        self._num_reserved -= from_reserved
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._num_cached -= block_id in self._hash_of
            self._forget(block_id)
            self._references[block_id] = 1
        return taken

    def free(self, block_ids: Sequence[BlockId]) -> int:
        """One reference fewer for each; returns how many blocks became free.

        Freed in reverse, so that a sequence's tail is evicted before its head.
        """
        num_freed = 0
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} was freed more often than it was taken"
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id in self._hash_of:
                    self._num_cached += 1
                else:
                    self._free.move_to_end(block_id, last=False)  # nothing is lost when it is taken
                num_freed += 1
        return num_freed

    def register(self, block_id: BlockId, name: BlockHash) -> None:
        """Names a full, confirmed block that is in use. The first holder of a name keeps it."""
        assert self._references[block_id] > 0
        if name in self._block_of or block_id in self._hash_of:
            return
        self._block_of[name] = block_id
        self._hash_of[block_id] = name
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def reserve(self, count: int) -> None:
        """Promises `count` blocks. Raises NoRoom, changing nothing, when they are not there."""
        if count > self.num_available:
            raise NoRoom(f"{count} blocks wanted, {self.num_available} available of {self.num_blocks}")
        self._num_reserved += count

    def unreserve(self, count: int) -> None:
        assert 0 <= count <= self._num_reserved
        self._num_reserved -= count

    def clear_cache(self) -> None:
        """Forgets every name; blocks in use stay with their owners, unnamed."""
        for block_id in list(self._hash_of):
            self._forget(block_id)
        self._num_cached = 0

    def held_hashes(self) -> list[BlockHash]:
        return list(self._block_of)

    def take_changes(self) -> IndexChanges:
        """The difference to what was held at the last call: a name that came and went between is in neither list."""
        changes = IndexChanges(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes

    def check_integrity(self) -> None:
        """Raises AssertionError where the accounts do not add up. Cheap enough to call in production."""
        for block_id, references in enumerate(self._references):
            is_free = BlockId(block_id) in self._free
            assert references >= 0, f"block {block_id} has {references} references"
            assert is_free == (references == 0), f"block {block_id}: {references} references, free: {is_free}"
        assert len(self._hash_of) == len(self._block_of)
        for block_id, name in self._hash_of.items():
            assert self._block_of[name] == block_id, f"block {block_id} and its name disagree"
        num_cached = sum(1 for block_id in self._free if block_id in self._hash_of)
        assert num_cached == self._num_cached, f"{num_cached} blocks are cached, {self._num_cached} on record"
        assert all(name in self._block_of for name in self._stored), "a name is reported as stored and is not held"
        assert not any(name in self._block_of for name in self._removed), "a name is reported as removed and is held"
        assert 0 <= self._num_reserved <= len(self._free), f"{self._num_reserved} promised, {len(self._free)} free"

    def _forget(self, block_id: BlockId) -> None:
        name = self._hash_of.pop(block_id, None)
        if name is None:
            return
        del self._block_of[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None
