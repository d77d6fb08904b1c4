"""An event loop whose time passes when the test says so. Nothing here ever waits."""

import asyncio
import heapq


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 1_000.0
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def settle(self) -> None:
        """Runs whatever can run now, and what that makes possible, until everyone waits for time or for the test."""
        while self._ready or (self._scheduled and self._scheduled[0].when() <= self.now_s):  # type: ignore[attr-defined]
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        """Wakes whoever is due, in order, each at its own time."""
        until_s = self.now_s + seconds
        self.settle()
        while (due_s := self._next_due_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.settle()
        self.now_s = until_s

    def _next_due_s(self) -> float | None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)
        return timers[0].when() if timers else None
