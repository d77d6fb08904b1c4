"""Who may ask decode for room now: first come, first served, while prefill's queue is short.

Room on decode is promised before prefill begins. A prompt that would only wait in prefill's queue waits here instead,
and holds nothing: decode's room is for prompts that are being computed or about to be.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.placement import Role
from gateway.registry import Registry


class PrefillTurns:
    def __init__(self, registry: Registry, window_tokens: int, on_waiting: Callable[[int], None]) -> None:
        """`window_tokens`: prompt tokens that a prefill worker may have to compute, and still gets one prompt more.
        `on_waiting` hears how many generations wait."""
        self._registry = registry
        self._window_tokens = window_tokens
        self._on_waiting = on_waiting
        self._queue: deque[object] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the turn, and holds it while the block runs: what is claimed there, the next one sees."""
        turn = object()
        self._queue.append(turn)
        self._on_waiting(len(self._queue))
        try:
            while self._queue[0] is not turn or not self._can_begin():
                await self._registry.next_load_change()
            yield
        finally:
            self._queue.remove(turn)
            self._on_waiting(len(self._queue))
            self._registry.note_load_change()

    def _can_begin(self) -> bool:
        """Also where nobody prefills: then there is nothing to wait for. A worker that others keep busy gets one prompt
        of ours at least."""
        workers = [worker for worker in self._registry.workers() if worker.role is Role.PREFILL]
        takers = [worker for worker in workers if worker.view().takes_work]
        return not takers or any(
            not worker.claims or worker.view().queued_tokens < self._window_tokens for worker in takers
        )
