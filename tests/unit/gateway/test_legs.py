"""Progress: what counts as it, and what happens without it. The timer is real and short; time itself is not."""

import asyncio
from collections.abc import AsyncIterator

from common.errors import PeerLost
from common.pb.decode_pb2 import GenerateEvent
from common.pb.worker_pb2 import WorkerStatus
from common.rpc.channel import open_channel
from gateway.legs import LegEnd, Legs
from gateway.placement import Role
from gateway.worker import Worker
from tests.support.gateway_stack import PATIENCE_S

TIMEOUT_S = 0.01


class ToldCall:
    """A call that sends what it is told to, until it is cancelled."""

    def __init__(self, *events: GenerateEvent) -> None:
        self._events: asyncio.Queue[GenerateEvent | None] = asyncio.Queue()
        self.is_cancelled = False
        self.has_begun = asyncio.Event()
        self.has_begun.set()
        for event in events:
            self.say(event)

    async def initial_metadata(self) -> None:
        """gRPC's: returns once the worker's headers are here."""
        await self.has_begun.wait()

    def say(self, event: GenerateEvent) -> None:
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        while (event := await self._events.get()) is not None:
            yield event
        raise asyncio.CancelledError  # as gRPC's own calls do

    def cancel(self) -> bool:
        self.is_cancelled = True
        self._events.put_nowait(None)
        return True


class Fixture:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.worker = Worker("127.0.0.1:9", Role.DECODE, open_channel("127.0.0.1:9"))
        self.legs = Legs(lambda: self.now_s, TIMEOUT_S)

    def open(self, *events: GenerateEvent) -> ToldCall:
        call = ToldCall(*events)
        self.legs.open(self.worker, call)  # type: ignore[arg-type]
        return call

    async def close(self) -> None:
        readers = self.legs.close()
        await asyncio.gather(*readers.values(), return_exceptions=True)
        await self.worker.close()


async def test_silence_is_a_loss_however_busy_the_worker_is() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.worker.update(WorkerStatus(num_steps=1))
    fixture.now_s += 1.0
    fixture.worker.update(WorkerStatus(num_steps=2))  # for others
    async with asyncio.timeout(PATIENCE_S):
        role, outcome = await fixture.legs.next()
    assert role is Role.DECODE
    assert isinstance(outcome, LegEnd)
    assert isinstance(outcome.error, PeerLost)
    assert "no progress" in outcome.error.message
    await fixture.close()


async def test_a_worker_that_says_that_it_goes_on_is_given_time() -> None:
    """More turns of the timer than any silence would be allowed."""
    fixture = Fixture()
    call = fixture.open()
    for _ in range(5):
        fixture.now_s += TIMEOUT_S
        call.say(GenerateEvent())
        async with asyncio.timeout(PATIENCE_S):
            assert await fixture.legs.next() == (Role.DECODE, GenerateEvent())
    fixture.now_s += 1.0  # from here on it is silent
    async with asyncio.timeout(PATIENCE_S):
        _, outcome = await fixture.legs.next()
    assert isinstance(outcome, LegEnd)
    await fixture.close()


async def test_closed_legs_say_nothing_more() -> None:
    fixture = Fixture()
    call = fixture.open(GenerateEvent())
    async with asyncio.timeout(PATIENCE_S):
        assert await fixture.legs.next() == (Role.DECODE, GenerateEvent())
    await fixture.close()
    assert call.is_cancelled
    waiting = asyncio.create_task(fixture.legs.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_close_cancels_the_call_and_not_the_task_that_reads_it() -> None:
    """gRPC's core keeps memory of a read whose task was cancelled: a gateway would grow with each request."""
    fixture = Fixture()
    fixture.open(GenerateEvent())
    async with asyncio.timeout(PATIENCE_S):
        assert await fixture.legs.next() == (Role.DECODE, GenerateEvent())
        (reader,) = fixture.legs.close().values()
        assert reader.cancelling() == 0
        await asyncio.wait({reader})
    assert reader.cancelled()
    await fixture.close()


async def test_a_call_that_has_not_begun_is_cut_as_soon_as_it_does() -> None:
    """Before, gRPC would cancel a task of its own that waits for the worker's headers, and keep its memory."""
    fixture = Fixture()
    call = fixture.open()
    call.has_begun.clear()
    (reader,) = fixture.legs.close().values()
    await asyncio.sleep(0)
    assert not call.is_cancelled
    call.has_begun.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({reader})
    assert call.is_cancelled
    await fixture.close()
