"""One child process: started so that it cannot outlive this process, logged to a file, watched, and ended.

Uses Linux's parent-death signal; the child leads its own process group, so a terminal's Ctrl-C reaches only us.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from cli.errors import ServiceDied

PR_SET_PDEATHSIG = 1
LOG_LINES_SHOWN = 20
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: the child may only call, not load


class Child:
    """Invariant: from `start` until `kill_group` the process is ours to end; `returncode` is None while it lives."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path, *, append: bool = False
    ) -> Self:
        """Precondition: called on the main thread, which the kernel takes for the child's parent."""
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before the call above
                os._exit(1)

        with log_path.open("ab" if append else "wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    def kill_group(self) -> None:
        """Ends the child and whatever it started and left in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def death(self) -> ServiceDied:
        """Precondition: the process has ended."""
        assert self._process.returncode is not None
        return ServiceDied(self.name, self._process.returncode, str(self.log_path), last_lines(self.log_path))


def last_lines(path: Path, limit: int = LOG_LINES_SHOWN) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as log:
        return [line.rstrip("\n") for line in deque(log, maxlen=limit)]
