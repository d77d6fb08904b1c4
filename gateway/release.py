"""The one fan-out at the end of every attempt: both workers give back what they hold, and say how much it was.

Runs in tasks of its own, so that neither the last token nor a cancelled client waits for it or stops it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import TwostrokeError
from common.ids import TransferId
from common.logs import fields
from gateway.placement import Role
from gateway.worker import Worker

log = logging.getLogger("twostroke.release")

RELEASE_TIMEOUT_S = 2.0


class Releases:
    """`on_freed(role, num_blocks)` hears what each worker answered. One that is lost has nothing left to free."""

    def __init__(self, on_freed: Callable[[Role, int], None]) -> None:
        self._on_freed = on_freed
        self._open: set[asyncio.Task[None]] = set()

    def start(
        self, transfer_id: TransferId, generation: int, worker: Worker, readers: Sequence["asyncio.Task[Any]"] = ()
    ) -> "asyncio.Task[None]":
        """Releases the generation and every older one on `worker`, once `readers` of its calls have ended."""
        task = asyncio.create_task(self._release(transfer_id, generation, worker, readers))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def settled(self) -> None:
        """Returns when no release is open. Each is bounded in time, and so is this."""
        while self._open:
            await asyncio.wait(self._open)

    async def _release(
        self, transfer_id: TransferId, generation: int, worker: Worker, readers: Sequence["asyncio.Task[Any]"]
    ) -> None:
        if readers:
            await asyncio.wait(readers, timeout=RELEASE_TIMEOUT_S)
            for reader in readers:
                reader.cancel()
        try:
            num_freed = await worker.release(transfer_id, generation, RELEASE_TIMEOUT_S)
        except TwostrokeError as error:
            log.info("release not confirmed: %s", error.message, extra=fields(transfer_id=transfer_id.hex()))
            return
        self._on_freed(worker.role, num_freed)
