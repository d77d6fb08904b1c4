"""Runs an engine's steps in one thread: steps while there is work, sleeps until woken when there is none."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("twostroke.engine")


class EngineThread:
    """`step` does one step and says whether there was anything to do.

    A step that raises ends the thread: the engine's state is unknown, so `on_fatal` must end the process.
    """

    def __init__(self, step: Callable[[], bool], on_fatal: Callable[[BaseException], None], name: str) -> None:
        self._step = step
        self._on_fatal = on_fatal
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is new work. Callable from any thread."""
        self._wake.set()

    def stop(self) -> None:
        """Returns once the step that runs now has ended; no further step starts."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wake.clear()
                if not self._step():
                    self._wake.wait()
        except BaseException as error:
            log.critical("the engine stopped", exc_info=error)
            self._on_fatal(error)
