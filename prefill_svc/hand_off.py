"""One job's way through the service: engine events in, PrefillEvents out, blocks pushed and spans recorded.

Two tasks: the call's own, which waits for the first token and returns it at once, and the push, which sends full
blocks while later chunks compute and commits when the first token is known.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from common.errors import Cancelled, TwostrokeError
from common.pb import decode_pb2, prefill_pb2
from common.rpc.convert import finish_to_pb, token_to_pb
from common.rpc.progress import progress_until
from common.sampling import FinishReason, OutputToken
from common.telemetry import names
from common.telemetry.recorder import SpanRecorder
from prefill_svc.job import PrefillJob
from prefill_svc.kv_sender import KVSender


@dataclass(frozen=True, slots=True)
class ChunkDone:
    num_tokens: int
    num_full_blocks: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    token: OutputToken
    finish_reason: FinishReason | None
    sampled_s: float


JobEvent = ChunkDone | FirstTokenSampled | TwostrokeError


class QueueListener:
    """A JobListener that carries the engine's events into the event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.events: asyncio.Queue[JobEvent] = asyncio.Queue()

    def on_chunk(self, num_tokens: int, num_full_blocks: int, start_s: float, end_s: float) -> None:
        self._put(ChunkDone(num_tokens, num_full_blocks, start_s, end_s))

    def on_first_token(self, token: OutputToken, finish_reason: FinishReason | None) -> None:
        self._put(FirstTokenSampled(token, finish_reason, time.monotonic()))

    def on_failed(self, error: TwostrokeError) -> None:
        self._put(error)

    def _put(self, event: JobEvent) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class HandOff:
    """`sender` None: nothing is pushed (the first token is all that is asked). `num_steps`: of the engine until now."""

    def __init__(
        self,
        job: PrefillJob,
        events: asyncio.Queue[JobEvent],
        sender: KVSender | None,
        spans: SpanRecorder,
        num_steps: Callable[[], int],
    ) -> None:
        self._num_steps = num_steps
        self._job = job
        self._events = events
        self._sender = sender
        self._spans = spans
        self._to_push: asyncio.Queue[ChunkDone | FirstTokenSampled] = asyncio.Queue()
        self._push: asyncio.Task[prefill_pb2.HandedOff] | None = None
        self._is_cancelled = False

    async def run(self) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """Yields FirstToken, then HandedOff unless the token ended the request; Progress while it goes on.

        Nobody reads the job's blocks once the generator is closed.
        """
        sender = self._sender
        if sender is not None:
            self._push = asyncio.create_task(self._push_blocks(sender))
        computing = asyncio.create_task(self._await_first_token())
        try:
            async for _ in progress_until(computing, self._num_steps):
                yield _progress()
            sampled = computing.result()
            goes_on = sampled.finish_reason is None
            if goes_on:
                self._to_push.put_nowait(sampled)  # first: its way to decode is longer than the token's to the client
            yield self._first_token_event(sampled)
            if goes_on and self._push is not None and sender is not None:
                async for _ in progress_until(self._push, lambda: sender.num_bytes_pushed):
                    yield _progress()
                yield prefill_pb2.PrefillEvent(handed_off=self._push.result())
        except asyncio.CancelledError:
            if self._is_cancelled:
                raise self._cancelled() from None
            raise
        finally:
            tasks = [task for task in (computing, self._push) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Ends `run` with Cancelled, wherever it stands."""
        self._is_cancelled = True
        self._events.put_nowait(self._cancelled())
        if self._push is not None:
            self._push.cancel()

    async def _await_first_token(self) -> FirstTokenSampled:
        is_queued = True
        while True:
            event = await self._next_event()
            if isinstance(event, TwostrokeError):
                raise event
            if isinstance(event, FirstTokenSampled):
                return event
            if is_queued:
                self._spans.record(names.SPAN_PREFILL_QUEUE, self._job.arrived_s, self._job.started_s, {})
                is_queued = False
            self._spans.record(
                names.SPAN_PREFILL_CHUNK, event.start_s, event.end_s, {names.ATTR_NUM_TOKENS: event.num_tokens}
            )
            self._to_push.put_nowait(event)

    async def _next_event(self) -> JobEvent:
        """The engine's next event; a push that failed ends the wait, so that no further chunk is computed for it."""
        if self._push is None:
            return await self._events.get()
        event = asyncio.ensure_future(self._events.get())
        try:
            await asyncio.wait({event, self._push}, return_when=asyncio.FIRST_COMPLETED)
            if self._push.done():
                self._push.result()  # raises: a push cannot succeed before the first token
            return await event
        finally:
            event.cancel()

    async def _push_blocks(self, sender: KVSender) -> prefill_pb2.HandedOff:
        """Sends full blocks as chunks complete them; after the first token the rest, and the commit."""
        try:
            while isinstance(event := await self._to_push.get(), ChunkDone):
                await self._push_some(sender, event.num_full_blocks, self._job.num_computed_tokens)
            await self._push_some(sender, len(self._job.table.block_ids), len(self._job.token_ids))
            return await self._commit(sender, event)
        finally:
            await sender.close()

    async def _push_some(self, sender: KVSender, num_ready: int, num_valid_tokens: int) -> None:
        started_s, before = time.monotonic(), sender.num_blocks_pushed
        try:
            await sender.push(self._job.table.block_ids, num_ready, num_valid_tokens)
        finally:
            num_blocks = sender.num_blocks_pushed - before
            if num_blocks:
                self._spans.record(names.SPAN_KV_PUSH, started_s, time.monotonic(), {names.ATTR_NUM_BLOCKS: num_blocks})

    async def _commit(self, sender: KVSender, sampled: FirstTokenSampled) -> prefill_pb2.HandedOff:
        started_s = time.monotonic()
        commit = decode_pb2.Commit(
            first_token=token_to_pb(sampled.token),
            num_prompt_tokens=len(self._job.token_ids),
            num_blocks=len(self._job.table.block_ids),
            num_cached_tokens=self._job.num_cached_tokens,
        )
        try:
            await sender.commit(commit)
        finally:
            # Also when cancelled: a short answer can be over before the acknowledgement has been read.
            ended_s = time.monotonic()
            attributes = {
                names.ATTR_NUM_BLOCKS: sender.num_blocks_pushed,
                names.ATTR_NUM_BYTES: sender.num_bytes_pushed,
            }
            self._spans.record(names.SPAN_KV_COMMIT, started_s, ended_s, attributes)
        return prefill_pb2.HandedOff(
            num_blocks_pushed=sender.num_blocks_pushed,
            num_bytes_pushed=sender.num_bytes_pushed,
            exposed_transfer_s=ended_s - sampled.sampled_s,
        )

    def _first_token_event(self, sampled: FirstTokenSampled) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(
            first_token=prefill_pb2.FirstToken(
                token=token_to_pb(sampled.token),
                finish_reason=finish_to_pb(sampled.finish_reason),
                num_cached_tokens=self._job.num_cached_tokens,
                queue_s=self._job.started_s - self._job.arrived_s,
                prefill_s=sampled.sampled_s - self._job.started_s,
            )
        )

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"{self._job.request_id}: released by the gateway")


def _progress() -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(progress=prefill_pb2.Progress())
