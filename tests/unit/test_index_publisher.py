"""The worker's side of the prefix index: what it publishes, when, and how it mends gaps. Time is the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from common.ids import BlockHash, mint_incarnation
from common.kv.block_pool import BlockPool, IndexChanges
from common.prefix_index.base import Holder
from common.prefix_index.publisher import IndexPublisher
from tests.support.flaky_index import FlakyIndex
from tests.support.manual_time import ManualTime

HEARTBEAT_S = 10.0
COALESCE_S = 1.0
HOLDER = Holder("decode-0", mint_incarnation())


class Worker:
    """A pool, an index that may fail, and the publisher between them."""

    def __init__(self) -> None:
        self.pool = BlockPool(16)
        self.index = FlakyIndex()
        self.time = ManualTime()
        self.publisher = IndexPublisher(
            self.index,
            HOLDER,
            self.pool.take_changes,
            self.pool.held_hashes,
            heartbeat_s=HEARTBEAT_S,
            coalesce_s=COALESCE_S,
            sleep=self.time.sleep,
        )

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.pool.register(self.pool.allocate(1)[0], name(number))

    async def indexed(self) -> int:
        is_down, self.index.is_down = self.index.is_down, False
        try:
            return await self.index.count(HOLDER)
        finally:
            self.index.is_down = is_down

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the first heartbeat's end on."""
        task = asyncio.create_task(self.publisher.run())
        await self.time.until_asleep(self.time.now_s + HEARTBEAT_S)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@pytest.fixture
async def worker() -> Worker:
    return Worker()


async def test_the_first_heartbeat_replaces_what_an_index_may_remember(worker: Worker) -> None:
    await worker.index.publish(HOLDER, [name(99)], [])
    worker.store(1, 2)
    assert not worker.publisher.is_available
    await worker.publisher.heartbeat()
    assert worker.publisher.is_available
    assert await worker.index.longest_prefix([name(1), name(2)], [HOLDER]) == {"decode-0": 2}
    assert await worker.indexed() == 2


async def test_changes_are_published_in_one_call_soon_after_they_occur(worker: Worker) -> None:
    async with worker.running():
        for number in range(5):
            worker.store(number)
            worker.publisher.notify()
        await worker.time.until_asleep(COALESCE_S)
        assert worker.index.calls["publish"] == 0
        worker.time.advance(COALESCE_S)
        await settle()
        assert worker.index.calls["publish"] == 1
        assert await worker.indexed() == 5


async def test_a_notice_without_a_change_costs_no_call(worker: Worker) -> None:
    async with worker.running():
        worker.publisher.notify()
        await worker.time.until_asleep(COALESCE_S)
        worker.time.advance(COALESCE_S)
        await settle()
        assert worker.index.calls["publish"] == 0


async def test_a_notice_may_come_from_another_thread(worker: Worker) -> None:
    async with worker.running():
        worker.store(1)
        await asyncio.to_thread(worker.publisher.notify)
        await worker.time.until_asleep(COALESCE_S)
        worker.time.advance(COALESCE_S)
        await settle()
        assert await worker.indexed() == 1


async def test_a_heartbeat_comes_even_when_the_pool_never_rests(worker: Worker) -> None:
    async with worker.running():
        for number in range(round(HEARTBEAT_S / COALESCE_S) + 1):
            worker.store(number)
            worker.publisher.notify()
            await settle()
            worker.time.advance(COALESCE_S)
            await settle()
        assert worker.index.calls["count"] == 1


async def test_a_gap_is_found_and_repaired(worker: Worker) -> None:
    worker.store(1, 2, 3)
    await worker.publisher.heartbeat()
    worker.index.lose_everything()
    await worker.publisher.heartbeat()
    assert worker.publisher.num_repairs == 1
    assert await worker.indexed() == 3
    await worker.publisher.heartbeat()
    assert worker.publisher.num_repairs == 1


async def test_a_heartbeat_publishes_what_is_pending_before_it_compares(worker: Worker) -> None:
    await worker.publisher.heartbeat()
    worker.store(1, 2)
    await worker.publisher.heartbeat()
    assert worker.publisher.num_repairs == 0
    assert await worker.indexed() == 2


async def test_an_outage_is_survived_and_then_everything_is_replaced(worker: Worker) -> None:
    worker.store(1)
    await worker.publisher.heartbeat()
    worker.index.is_down = True
    worker.store(2)
    await worker.publisher.publish_changes()
    assert not worker.publisher.is_available
    calls_before = worker.index.calls.total()
    worker.store(3)
    await worker.publisher.publish_changes()
    assert worker.index.calls.total() == calls_before, "an index that is away is asked at heartbeats alone"
    assert not worker.pool.take_changes(), "changes do not pile up meanwhile"
    await worker.publisher.heartbeat()
    assert not worker.publisher.is_available
    worker.index.is_down = False
    await worker.publisher.heartbeat()
    assert worker.publisher.is_available
    assert await worker.indexed() == 3


async def test_an_evicted_block_is_removed(worker: Worker) -> None:
    block_ids = worker.pool.allocate(1)
    worker.pool.register(block_ids[0], name(1))
    await worker.publisher.heartbeat()
    worker.pool.free(block_ids)
    worker.pool.clear_cache()
    await worker.publisher.publish_changes()
    assert await worker.indexed() == 0


async def test_a_worker_that_leaves_is_forgotten(worker: Worker) -> None:
    worker.store(1)
    await worker.publisher.heartbeat()
    await worker.publisher.close()
    assert await worker.indexed() == 0
    assert worker.index.calls["close"] == 1


async def test_leaving_an_index_that_is_away_raises_nothing(worker: Worker) -> None:
    worker.index.is_down = True
    await worker.publisher.close()
    assert not worker.publisher.is_available
    assert worker.index.calls["close"] == 1


async def test_a_pool_of_another_thread_is_asked_by_coroutines() -> None:
    pool, index = BlockPool(4), FlakyIndex()
    pool.register(pool.allocate(1)[0], name(7))

    async def take_changes() -> IndexChanges:
        return await asyncio.to_thread(pool.take_changes)

    async def held_hashes() -> list[BlockHash]:
        return await asyncio.to_thread(pool.held_hashes)

    publisher = IndexPublisher(index, HOLDER, take_changes, held_hashes)
    await publisher.heartbeat()
    assert await index.count(HOLDER) == 1


async def settle() -> None:
    """Lets every task run until it waits for time or for the test."""
    for _ in range(20):
        await asyncio.sleep(0)
