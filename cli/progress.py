"""Says what a command is doing, one line a step, each with the seconds since the command began."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._began = clock()

    def step(self, text: str) -> None:
        self._out.write(f"[{self._clock() - self._began:6.1f} s] {text}\n")
        self._out.flush()

    @contextmanager
    def reminder(self, text: str, every_s: float = 5.0) -> Iterator[None]:
        """Repeats `text` while the body, which cannot speak for itself, goes on."""
        done = threading.Event()

        def remind() -> None:
            while not done.wait(every_s):
                self.step(text)

        thread = threading.Thread(target=remind, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
