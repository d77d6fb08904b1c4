"""Keeps the prefix index in step with one worker's block pool, from the worker's side.

Owns the worker's lease and the repair of gaps; never raises into the service, and never delays it.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from common.ids import BlockHash
from common.prefix_index.base import Holder, PrefixIndex, PrefixIndexUnavailable

log = logging.getLogger("twostroke.prefix_index")

HEARTBEAT_S = 5.0
COALESCE_S = 0.02
T = TypeVar("T")


class Changes(Protocol):
    """What `BlockPool.take_changes` returns."""

    @property
    def stored(self) -> Sequence[BlockHash]: ...

    @property
    def removed(self) -> Sequence[BlockHash]: ...


class IndexPublisher:
    """`run()` is the worker's task; `notify()` says that the pool has changed; `close()` says that the worker leaves.

    `take_changes` and `held_hashes` are called on the event loop, in this order; where another thread owns the pool
    they may be coroutine functions that ask it. A change between the two calls costs at most a needless repair.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: Holder,
        take_changes: Callable[[], Changes | Awaitable[Changes]],
        held_hashes: Callable[[], Collection[BlockHash] | Awaitable[Collection[BlockHash]]],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        coalesce_s: float = COALESCE_S,
        sleep: Callable[[float], Coroutine[None, None, None]] = asyncio.sleep,
    ) -> None:
        """Owns `index`, whose lease must be several heartbeats long."""
        self._index = index
        self._holder = holder
        self._take_changes = take_changes
        self._held_hashes = held_hashes
        self._heartbeat_s = heartbeat_s
        self._coalesce_s = coalesce_s
        self._sleep = sleep
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._must_replace = True  # what an index holds of this worker at the start is unknown
        self.is_available = False
        self.num_repairs = 0

    def notify(self) -> None:
        """The pool has changed: publish soon. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._changed.set)

    async def run(self) -> None:
        """Publishes until cancelled. A heartbeat comes when it is due, however often the pool changes."""
        while True:
            await self.heartbeat()
            due = asyncio.ensure_future(self._sleep(self._heartbeat_s))
            try:
                while await self._changed_before(due):
                    await self._sleep(self._coalesce_s)
                    await self.publish_changes()
            finally:
                due.cancel()

    async def publish_changes(self) -> None:
        """One publish of what has changed. During an outage the changes are dropped: a heartbeat will replace all."""
        self._changed.clear()
        changes = await _value_of(self._take_changes())
        if not self._must_replace and (changes.stored or changes.removed):
            await self._attempt(self._index.publish(self._holder, changes.stored, changes.removed))

    async def heartbeat(self) -> None:
        """Renews the lease, publishes, compares counts; replaces everything after an outage or where they differ."""
        self._changed.clear()
        changes = await _value_of(self._take_changes())
        held = await _value_of(self._held_hashes())
        if not self._must_replace:
            await self._attempt(self._renew_and_compare(changes, len(held)))
        if self._must_replace and await self._attempt(self._index.replace(self._holder, held)):
            self._must_replace = False

    async def close(self) -> None:
        """The worker leaves: its entries go, and the index is closed. Call it after `run` was cancelled."""
        await self._attempt(self._index.forget(self._holder))
        await self._index.close()

    async def _renew_and_compare(self, changes: Changes, num_held: int) -> None:
        await self._index.publish(self._holder, changes.stored, changes.removed)
        num_indexed = await self._index.count(self._holder)
        if num_indexed != num_held:
            log.warning(
                "the prefix index has %d blocks of this worker, which holds %d: repaired", num_indexed, num_held
            )
            self.num_repairs += 1
            self._must_replace = True

    async def _attempt(self, call: Awaitable[None]) -> bool:
        """Whether the index answered. A state that changes is logged once."""
        was_available = self.is_available
        try:
            await call
        except PrefixIndexUnavailable as error:
            self.is_available = False
            self._must_replace = True
            if was_available:
                log.warning("going on without the prefix index: %s", error)
            return False
        self.is_available = True
        if not was_available:
            log.info("the prefix index is available")
        return True

    async def _changed_before(self, due: "asyncio.Future[None]") -> bool:
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            awaited: set[asyncio.Future[Any]] = {changed, due}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            return not due.done()
        finally:
            changed.cancel()


async def _value_of(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
