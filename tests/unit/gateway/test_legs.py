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


class SilentCall:
    """A call that sends what it is given and then nothing, until it is cancelled."""

    def __init__(self, *events: GenerateEvent) -> None:
        self._events = events
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        for event in self._events:
            yield event
        await asyncio.Event().wait()

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


class Fixture:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.worker = Worker("127.0.0.1:9", Role.DECODE, open_channel("127.0.0.1:9"), lambda: self.now_s)
        self.legs = Legs(lambda: self.now_s, TIMEOUT_S)

    def open(self, *events: GenerateEvent) -> SilentCall:
        call = SilentCall(*events)
        self.legs.open(self.worker, call)  # type: ignore[arg-type]
        return call

    async def close(self) -> None:
        readers = self.legs.close()
        await asyncio.gather(*readers.values(), return_exceptions=True)
        await self.worker.close()


async def test_silence_of_an_idle_worker_is_a_loss() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.now_s += 1.0
    async with asyncio.timeout(PATIENCE_S):
        role, outcome = await fixture.legs.next()
    assert role is Role.DECODE
    assert isinstance(outcome, LegEnd)
    assert isinstance(outcome.error, PeerLost)
    assert "no progress" in outcome.error.message
    await fixture.close()


async def test_a_queue_that_moves_is_progress() -> None:
    """The worker steps for others while this request waits: more turns of the timer than any one would allow."""
    fixture = Fixture()
    fixture.open()
    num_turns = 0
    turned = asyncio.Event()

    def step() -> None:
        nonlocal num_turns
        num_turns += 1
        fixture.now_s += TIMEOUT_S
        fixture.worker.update(WorkerStatus(num_steps=num_turns))
        if num_turns < 5:
            loop.call_later(TIMEOUT_S, step)
        else:
            turned.set()

    loop = asyncio.get_running_loop()
    step()
    waiting = asyncio.create_task(fixture.legs.next())
    async with asyncio.timeout(PATIENCE_S):
        await turned.wait()
    assert not waiting.done()
    fixture.now_s += 1.0  # from here on it stands still
    async with asyncio.timeout(PATIENCE_S):
        _, outcome = await waiting
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


async def test_a_changed_queue_alone_is_no_progress() -> None:
    fixture = Fixture()
    fixture.worker.update(WorkerStatus(num_steps=1))
    before_s = fixture.worker.last_progress_s
    fixture.now_s += 1.0
    fixture.worker.update(WorkerStatus(num_steps=1, num_waiting=5))
    assert fixture.worker.last_progress_s == before_s
    fixture.worker.update(WorkerStatus(num_steps=1, kv_bytes_moved=5))
    assert fixture.worker.last_progress_s == fixture.now_s
    await fixture.worker.close()
