"""Asks the workers themselves how much of a text they hold, when a generation has to find another place.

The prefix index is a hint that may be away or late; a move is rare, and worth a question. Who does not answer in time
is taken to hold nothing: it costs computation, never correctness.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from common.errors import TwostrokeError
from common.ids import BlockHash
from gateway.worker import Worker

log = logging.getLogger("twostroke.held_blocks")

ASK_TIMEOUT_S = 0.25


async def held_by(workers: Sequence[Worker], hashes: Sequence[BlockHash]) -> Mapping[str, int]:
    """worker_id -> leading blocks of `hashes` that it holds now."""
    counts = await asyncio.gather(*(_count(worker, hashes) for worker in workers))
    return {worker.info.worker_id: count for worker, count in zip(workers, counts, strict=True)}


async def _count(worker: Worker, hashes: Sequence[BlockHash]) -> int:
    try:
        return await worker.count_held(hashes, ASK_TIMEOUT_S)
    except TwostrokeError as error:
        log.info("taken to hold nothing: %s", error.message)
        return 0
