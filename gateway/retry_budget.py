"""How many retries all generations may make together. Pure.

A fleet that fails every request must not get each of them several times over: every generation earns a part of a retry,
every retry costs one, and a reserve lets a quiet gateway survive the loss of a worker with many streams.
"""


class RetryBudget:
    def __init__(self, ratio: float, reserve: int) -> None:
        """`ratio`: retries that one generation earns; `reserve`: retries at the start, and the most that is saved."""
        self._ratio = ratio
        self._reserve = reserve
        self._left = float(reserve)

    @property
    def num_left(self) -> int:
        return int(self._left)

    def earn(self) -> None:
        self._left = min(self._left + self._ratio, float(self._reserve))

    def spend(self) -> bool:
        """Whether there was a retry left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
