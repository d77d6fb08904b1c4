"""Threads that help a caller with one job. The caller never waits for a helper to wake up, only for work in progress.

A job is a compiled function that takes parts from a shared counter until none is left, without the interpreter's
lock: whoever comes takes the next part. A helper that comes too late finds the job closed, so on a machine with busy
cores the caller simply does the work itself. Helpers sleep while there is nothing to do; nobody spins.
"""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]


class _SharedJob:
    """open -> closed by the caller; helpers enter only while it is open."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._is_open = True
        self._num_inside = 0
        self._last_left = threading.Lock()
        self.error: BaseException | None = None

    def help(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._num_inside += 1
            if self._num_inside == 1:
                self._last_left.acquire()
        try:
            self._job()
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self._last_left.release()

    def close(self) -> None:
        """Returns when no helper is inside; none enters afterwards."""
        with self._lock:
            self._is_open = False
            nobody = self._num_inside == 0
        if not nobody:
            self._last_left.acquire()


class HelperPool:
    """Up to `num_threads - 1` helpers, started when first needed. Any thread may call `run`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_SharedJob] = queue.SimpleQueue()
        self._num_helpers = 0
        self._start_lock = threading.Lock()

    def run(self, job: Job, num_threads: int) -> None:
        """Runs `job` here and on up to num_threads - 1 helpers at once; returns when all of it is done."""
        shared = _SharedJob(job)
        self._start_helpers(num_threads - 1)
        for _ in range(num_threads - 1):
            self._jobs.put(shared)
        try:
            job()
        finally:
            shared.close()

    def _start_helpers(self, count: int) -> None:
        if count <= self._num_helpers:
            return
        with self._start_lock:
            while self._num_helpers < count:
                threading.Thread(
                    target=self._help_forever, name=f"kernel-helper-{self._num_helpers}", daemon=True
                ).start()
                self._num_helpers += 1

    def _help_forever(self) -> None:
        while True:
            self._jobs.get().help()
