"""The index's contract: workers publish what they hold, the gateway asks for the longest cached prefix."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.ids import BlockHash, Incarnation

INDEX_NAMESPACE = "v1"
"""Part of every key: the version of the entries' form. Deployments that share a store need no other: hashes are
seeded with the model's fingerprint."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One start of one worker. Entries of another incarnation of the same worker are not seen."""

    worker_id: str
    incarnation: Incarnation


class PrefixIndex(Protocol):
    """Every call raises `PrefixIndexUnavailable` when the store cannot answer in time; callers go on without it."""

    async def publish(self, holder: Holder, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Adds and removes blocks of `holder`, and renews its lease. Removals are applied before additions."""

    async def replace(self, holder: Holder, held: Iterable[BlockHash]) -> None:
        """Makes `held` all that `holder` holds: after a gap, a cleared cache, or a store that forgot."""

    async def count(self, holder: Holder) -> int:
        """Blocks on record for `holder`: a difference from the worker's own count is a gap."""

    async def longest_prefix(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        """worker_id -> how many leading blocks of `hashes` it holds, without a gap. Workers with none may be absent."""

    async def forget(self, holder: Holder) -> None:
        """Drops all of `holder`'s entries: it left."""

    async def close(self) -> None: ...


class PrefixIndexUnavailable(Exception):
    """The store is slow, gone or answers nonsense. Never a request's failure."""
