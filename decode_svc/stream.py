"""One sequence's way through the service: engine events in, GenerateEvents out, spans recorded."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from common.errors import TwostrokeError
from common.pb import decode_pb2
from common.rpc.convert import finish_to_pb, token_to_pb
from common.rpc.progress import Ticks
from common.telemetry import names
from common.telemetry.recorder import SpanRecorder
from decode_svc.engine import StepOutput
from decode_svc.sequence import Sequence

VERIFY_SPAN_EVERY = 16
"""One in this many verifications of a sequence gets a span."""


class Tick:
    """The engine has stepped, and the sequence may still wait."""


StreamEvent = StepOutput | TwostrokeError | Tick


class QueueListener:
    """A SequenceListener that carries the engine's events into the event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def on_step(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, output)

    def on_failed(self, error: TwostrokeError) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, error)


class SequenceStream:
    def __init__(
        self,
        sequence: Sequence,
        events: asyncio.Queue[StreamEvent],
        spans: SpanRecorder,
        num_steps: Callable[[], int],
    ) -> None:
        """`num_steps`: of the engine until now."""
        self._num_steps = num_steps
        self._sequence = sequence
        self._events = events
        self._spans = spans
        self._num_verified = 0

    async def run(self) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        """Yields an event for each step that brought tokens, until one has a finish reason, and now and then an empty
        one while the engine steps. Statistics travel in the first event with tokens and in the last."""
        sequence = self._sequence
        is_first = True
        last_s = sequence.arrived_s
        ticks = Ticks(self._num_steps, lambda: self._events.put_nowait(Tick()))
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, TwostrokeError):
                    raise event
                if isinstance(event, Tick):
                    yield decode_pb2.GenerateEvent()
                    continue
                self._record_step(event)
                last_s = event.end_s
                if not event.tokens:
                    continue
                has_stats = is_first or event.finish_reason is not None
                is_first = False
                yield decode_pb2.GenerateEvent(
                    tokens=[token_to_pb(token) for token in event.tokens],
                    finish_reason=finish_to_pb(event.finish_reason),
                    stats=self._stats() if has_stats else None,
                    first_position=event.first_position,
                )
                if event.finish_reason is not None:
                    return
        finally:
            ticks.stop()
            self._record_stream(last_s)

    def _stats(self) -> decode_pb2.GenerateStats:
        sequence = self._sequence
        return decode_pb2.GenerateStats(
            num_cached_tokens=sequence.num_cached_tokens,
            num_computed_prompt_tokens=sequence.num_computed_prompt_tokens,
            queue_s=sequence.started_s - sequence.arrived_s,
            prefill_s=sequence.first_token_s - sequence.started_s,
            num_preemptions=sequence.num_preemptions,
            num_draft_tokens=sequence.num_draft_tokens,
            num_accepted_tokens=sequence.num_accepted_tokens,
            num_target_passes=sequence.num_target_passes,
            num_refetched_blocks=sequence.num_refetched_blocks,
        )

    def _record_step(self, step: StepOutput) -> None:
        if step.num_prompt_tokens:
            self._spans.record(
                names.SPAN_PREFILL_CHUNK, step.start_s, step.end_s, {names.ATTR_NUM_TOKENS: step.num_prompt_tokens}
            )
        if not step.num_drafted:
            return
        if self._num_verified % VERIFY_SPAN_EVERY == 0:
            self._spans.record(
                names.SPAN_SPEC_VERIFY,
                step.start_s,
                step.end_s,
                {names.ATTR_DRAFT_TOKENS: step.num_drafted, names.ATTR_ACCEPTED_TOKENS: step.num_accepted},
            )
        self._num_verified += 1

    def _record_stream(self, ended_s: float) -> None:
        sequence = self._sequence
        if not sequence.started_s:
            return  # ended before its first step
        self._spans.record(names.SPAN_DECODE_QUEUE, sequence.arrived_s, sequence.started_s, {})
        attributes = {
            names.ATTR_OUTPUT_TOKENS: len(sequence.output_token_ids),
            names.ATTR_TARGET_PASSES: sequence.num_target_passes,
            names.ATTR_DRAFT_TOKENS: sequence.num_draft_tokens,
            names.ATTR_ACCEPTED_TOKENS: sequence.num_accepted_tokens,
        }
        self._spans.record(names.SPAN_DECODE_STREAM, sequence.started_s, ended_s, attributes)
