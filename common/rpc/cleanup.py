"""Work that must be done at a call's end, however often the call is cancelled meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Cleanups:
    """Runs each coroutine to its end in a task of its own; the caller waits for it, and may be cancelled meanwhile."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
