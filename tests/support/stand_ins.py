"""Services made of `stand_in_service`, and the FIFO through which they tell what happens to them."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from cli.stack import Service


async def at_once() -> None:
    """For services that need no time to become ready."""


def stand_in(
    name: str,
    fifo: str | Path,
    *flags: str,
    stage: int = 1,
    until_ready: Callable[[], Awaitable[None]] = at_once,
    may_restart: bool = False,
) -> Service:
    script = Path(__file__).with_name("stand_in_service.py")
    argv = (sys.executable, str(script), "--name", name, "--fifo", str(fifo), *flags)
    return Service(name, argv, stage, until_ready, may_restart)


class Events:
    """Reads what stand-ins tell. End-of-file comes when the last process that holds the FIFO is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._hold = os.open(path, os.O_WRONLY)  # no end-of-file before the first stand-in opens it
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.BaseTransport | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._read_end, "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)

    async def next(self) -> tuple[str, str, int]:
        """Name, event, process id."""
        line = await self._reader.readline()
        name, event, pid = line.decode().split()
        return name, event, int(pid)

    async def started(self, count: int) -> dict[str, int]:
        """Process ids by name, once `count` stand-ins have started."""
        events = [await self.next() for _ in range(count)]
        assert all(event == "started" for _, event, _ in events)
        return {name: pid for name, _, pid in events}

    async def until_all_gone(self) -> list[tuple[str, str]]:
        """What is told from here on, until no process holds the FIFO."""
        os.close(self._hold)
        self._hold = -1
        lines = (await self._reader.read()).decode().splitlines()
        return [(name, event) for name, event, _ in (line.split() for line in lines)]

    def close(self) -> None:
        if self._hold >= 0:
            os.close(self._hold)
        if self._transport is not None:
            self._transport.close()
