"""What of a transfer was sent, in which frame and how often, and what has to be sent again. Pure policy.

A report answers the frames that arrived before it. A block that was sent again since then is on its way, and is not
sent a third time for the same loss.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import CorruptFrame

MAX_SENDS = 8
"""Of one block: the first, and more for faults that pass. A path that damages it every time is given up."""


@dataclass(frozen=True, slots=True)
class Run:
    """Logical blocks [start, end)."""

    start: int
    end: int


@dataclass(slots=True)
class SentBlocks:
    peer: str  # for messages
    _next_sequence_number: int = 0
    _last_frame: dict[int, int] = field(default_factory=dict)  # block -> number of the last frame that held it
    _num_sends: dict[int, int] = field(default_factory=dict)  # block -> how often it was sent or is about to be
    _again: deque[Run] = field(default_factory=deque)
    _queued: set[int] = field(default_factory=set)  # blocks of `_again`

    def number_frame(self, run: Run | None = None) -> int:
        """The next frame's number; `run` is what it holds."""
        number = self._next_sequence_number
        self._next_sequence_number += 1
        for block in range(run.start, run.end) if run else ():
            self._last_frame[block] = number
            self._num_sends.setdefault(block, 1)
        return number

    def reported(self, sequence_number: int, missing: Iterable[Run], damaged: Run) -> bool:
        """Notes what did not arrive; whether there is anything to send again now.

        `sequence_number`: of the latest frame that arrived whole. `damaged`: what a later frame seems to have held.
        Raises CorruptFrame when a block has been sent MAX_SENDS times.
        """
        lost = {
            block
            for run in missing
            for block in range(run.start, run.end)
            if self._last_frame.get(block, sequence_number + 1) <= sequence_number
        }
        lost |= {block for block in range(damaged.start, damaged.end) if block in self._last_frame}
        for block in sorted(lost - self._queued):
            self._queue(block)
        return bool(self._queued)

    def take_again(self) -> Run | None:
        """A run that is to be sent again, or None."""
        if not self._again:
            return None
        run = self._again.popleft()
        self._queued.difference_update(range(run.start, run.end))
        return run

    def _queue(self, block: int) -> None:
        self._num_sends[block] += 1
        if self._num_sends[block] > MAX_SENDS:
            raise CorruptFrame(f"block {block} did not arrive whole at {self.peer} in {MAX_SENDS} sendings")
        self._queued.add(block)
        if self._again and self._again[-1].end == block:
            self._again[-1] = Run(self._again[-1].start, block + 1)
        else:
            self._again.append(Run(block, block + 1))
