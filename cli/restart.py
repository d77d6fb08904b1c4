"""When a service that ended is started again, and when not any more. Pure."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_FAILED_STARTS = 5
STEADY_S = 60.0
"""Who served for this long before it died has nothing to do with an earlier death."""


class Restarts:
    """The ends of one service, in order."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._num_failed_starts = 0

    def pause_s(self, exit_code: int, served_s: float | None) -> float | None:
        """How long to wait before the next start; None: give up.

        `served_s` is how long it had been ready; None: it never was. Whoever ends with 0 after that was asked to, and
        is started again at once.
        """
        self._num_failed_starts = self._num_failed_starts + 1 if served_s is None else 0
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        if served_s is not None and exit_code == 0:
            return 0.0
        is_new_trouble = served_s is not None and served_s >= STEADY_S
        self._num_deaths = 1 if is_new_trouble else self._num_deaths + 1
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._num_deaths - 1))
