"""Tells a caller that its call goes on, where there is nothing else to tell for a while."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from common.rpc.limits import PROGRESS_INTERVAL_S


async def progress_until(done: "asyncio.Future[Any]", marker: Callable[[], int]) -> AsyncGenerator[None, None]:
    """Yields after each PROGRESS_INTERVAL_S in which `marker` has changed, until `done` is."""
    before = marker()
    while True:
        await asyncio.wait({done}, timeout=PROGRESS_INTERVAL_S)
        if done.done():
            return
        if (now := marker()) != before:
            before = now
            yield


class Ticks:
    """Calls `tell` after each PROGRESS_INTERVAL_S in which `marker` has changed. Costs nothing in between."""

    def __init__(self, marker: Callable[[], int], tell: Callable[[], None]) -> None:
        self._marker = marker
        self._tell = tell
        self._before = marker()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PROGRESS_INTERVAL_S, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        now, before = self._marker(), self._before
        if now != before:
            self._before = now
            self._tell()
        self._timer = self._loop.call_later(PROGRESS_INTERVAL_S, self._tick)
