"""Which workers a generation avoids, and from when on it may use them again. Pure: the time is an argument.

A worker that failed a generation comes after every worker that has not. Where no other takes work, it is used again:
at once when it is known to be alive; after a loss, or when it fails again, once it has stayed ready for longer than a
death goes unnoticed; after a refusal when the pause that it asked for is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import Draining, NoRoom, PeerLost, TwostrokeError
from common.rpc.limits import KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS
from gateway.placement import WorkerView

UNNOTICED_S = (KEEPALIVE_INTERVAL_MS + KEEPALIVE_TIMEOUT_MS) / 1000 + 1.0
"""A worker that dies is not ready any more after this time, however it dies."""
REFUSAL_PAUSE_S = 1.0
"""After a refusal that names no pause."""

Registration = tuple[str, int]
"""A worker's address and how often it had registered there: a worker that comes back is another one."""


@dataclass(slots=True)
class Avoided:
    _again_s: dict[Registration, float] = field(default_factory=dict)  # when it may be used again

    def add(self, view: WorkerView, error: TwostrokeError, now_s: float) -> None:
        """`view` failed with `error`."""
        self._again_s[_registration(view)] = now_s + self._pause_s(view, error)

    def __contains__(self, view: WorkerView) -> bool:
        """Whether it ever failed this generation."""
        return _registration(view) in self._again_s

    def may_use(self, view: WorkerView, now_s: float) -> bool:
        return self._again_s.get(_registration(view), now_s) <= now_s

    def usable(self, views: Iterable[WorkerView], now_s: float) -> list[WorkerView]:
        """Of workers of one role: those that take work and never failed; where there is none, those to use again."""
        takers = [view for view in views if view.takes_work and self.may_use(view, now_s)]
        return [view for view in takers if view not in self] or takers

    def next_pause_end_s(self, now_s: float) -> float | None:
        """When asking again may have another answer, though no worker has changed."""
        return min((again_s for again_s in self._again_s.values() if again_s > now_s), default=None)

    def _pause_s(self, view: WorkerView, error: TwostrokeError) -> float:
        if isinstance(error, NoRoom | Draining):
            return error.retry_after_s or REFUSAL_PAUSE_S
        return UNNOTICED_S if isinstance(error, PeerLost) or view in self else 0.0


def _registration(view: WorkerView) -> Registration:
    return view.address, view.registration
