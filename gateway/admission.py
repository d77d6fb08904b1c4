"""The bound on generations at once: beyond it a request is refused before anything is allocated for it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import Draining, NoRoom

RETRY_AFTER_S = 1.0


class Admission:
    """Counts open generations. One event loop; no lock needed."""

    def __init__(self, max_active: int) -> None:
        self.max_active = max_active
        self.num_active = 0
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place while the block runs; NoRoom when none is left, Draining once closed."""
        if self.is_closed:
            raise Draining("this gateway is shutting down; send the request again", retry_after_s=RETRY_AFTER_S)
        if self.num_active >= self.max_active:
            raise NoRoom(
                f"{self.num_active} generations are active, the most that this gateway takes; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    def close(self) -> None:
        """Nobody is admitted from now on."""
        self.is_closed = True

    async def idle(self) -> None:
        """Returns when no generation is open."""
        await self._idle.wait()
