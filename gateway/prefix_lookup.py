"""Asks the prefix index, within a deadline. Its answer is a hint: without it placement goes by load alone."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from common.ids import BlockHash
from common.prefix_index.base import Holder, PrefixIndex, PrefixIndexUnavailable

log = logging.getLogger("twostroke.prefix_lookup")

PAUSE_S = 1.0
"""After a failure the index is left alone for this long, so that a slow one does not slow every request."""


class PrefixLookup:
    """`on_available` hears after each try whether the index answered. No index: nothing is held, nothing is said."""

    def __init__(
        self,
        index: PrefixIndex | None,
        timeout_s: float,
        clock: Callable[[], float],
        on_available: Callable[[bool], None],
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_available = on_available
        self._is_available = True
        self._resume_s = 0.0

    async def held_blocks(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        """worker_id -> leading blocks of `hashes` it holds; empty when the index cannot say in time. Never raises."""
        if self._index is None or not hashes or not holders or self._clock() < self._resume_s:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await self._index.longest_prefix(hashes, holders)
        except (PrefixIndexUnavailable, TimeoutError) as error:
            self._resume_s = self._clock() + PAUSE_S
            self._note(False, str(error) or f"no answer within {self._timeout_s * 1000:g} ms")
            return {}
        self._note(True, "")
        return held

    def _note(self, is_available: bool, why: str) -> None:
        self._on_available(is_available)
        if self._is_available and not is_available:
            log.warning("the prefix index is away, placement goes by load alone: %s", why)
        if is_available and not self._is_available:
            log.info("the prefix index is back")
        self._is_available = is_available
