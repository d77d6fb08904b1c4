"""Long computations in a thread, so that other requests and streams go on meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_thread_if(is_long: bool, compute: Callable[[], ResultT]) -> ResultT:
    """For what is short a thread costs more than it saves."""
    return await asyncio.to_thread(compute) if is_long else compute()
