"""Threads that help a caller with one job. The caller never waits for a helper to wake up, only for work in progress.

A job is a compiled function that takes parts from a shared counter until none is left, without the interpreter's
lock: whoever comes takes the next part. A helper that comes too late finds the job closed, so on a machine with busy
cores the caller simply does the work itself. Helpers sleep while there is no job.
"""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]


class _SharedJob:
    """Open, then closed by the caller; helpers enter only while it is open."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._lock = threading.Lock()
        self._num_inside = 0
        self._empty = threading.Condition(self._lock)
        self._error: MemoryError | None = None

    def help(self) -> None:
        with self._lock:
            job = self._job
            if job is None:
                return
            self._num_inside += 1
        error = None
        try:
            job()
        except MemoryError as caught:  # all that compiled jobs raise
            error = caught
        with self._lock:
            self._error = error or self._error
            self._num_inside -= 1
            self._empty.notify()

    def close(self) -> None:
        """Returns when no helper is inside; none enters afterwards, and one that would holds on to nothing."""
        with self._lock:
            self._job = None
            while self._num_inside:
                self._empty.wait()
        if self._error is not None:
            raise self._error


class HelperPool:
    """Helpers are started when first needed. Any thread may call `run`."""

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
                name = f"kernel-helper-{self._num_helpers}"
                threading.Thread(target=_help_forever, args=(self._jobs,), name=name, daemon=True).start()
                self._num_helpers += 1


def _help_forever(jobs: "queue.SimpleQueue[_SharedJob]") -> None:
    while True:
        jobs.get().help()
