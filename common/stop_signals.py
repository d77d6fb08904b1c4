"""SIGTERM and SIGINT as events, for processes that end in order."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

HANDLED = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals() -> "Iterator[asyncio.Queue[str]]":
    """Names of the signals that arrive, in order, while the block runs."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[str] = asyncio.Queue()
    for number in HANDLED:
        loop.add_signal_handler(number, received.put_nowait, number.name)
    try:
        yield received
    finally:
        for number in HANDLED:
            loop.remove_signal_handler(number)
