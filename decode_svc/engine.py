"""The decode engine: one step is propose -> schedule -> run -> sample -> verify -> publish. Knows no network.

Thread safety: `step` belongs to the engine's thread; everything else may be called from any thread. `lock` guards the
pool, the scheduler and the transfers, and is never held while the model runs.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from common.engine_load import EngineLoad, EngineTotals
from common.errors import NumericFailure, TwostrokeError
from common.ids import BlockHash
from common.kv.block_pool import IndexChanges
from common.kv.block_table import BlockTable
from common.model.runner import ModelRunner
from common.model.sampler import sample
from common.sampling import FinishReason, OutputToken
from decode_svc.batch import row_ranges, sample_rows, scheduled_tokens
from decode_svc.scheduler import DecodeScheduler, ScheduledSequence
from decode_svc.sequence import Sequence
from decode_svc.speculation.proposer import Proposer
from decode_svc.speculation.verify import count_accepted


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought one sequence."""

    tokens: tuple[OutputToken, ...]
    first_position: int  # output position of the first of them
    finish_reason: FinishReason | None
    num_prompt_tokens: int  # prompt tokens that this step computed
    num_drafted: int
    num_accepted: int
    start_s: float
    end_s: float


class SequenceListener(Protocol):
    """Told of a sequence's progress, in the engine's thread. Must not block."""

    def on_step(self, output: StepOutput) -> None: ...

    def on_failed(self, error: TwostrokeError) -> None:
        """The sequence has ended and holds nothing."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    max_draft_tokens: int  # a step verifies at most this many for each sequence
    max_batch: int  # with more running sequences than this nothing is proposed: the batch fills the machine already


@dataclass(slots=True)
class DecodeTotals(EngineTotals):
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A scheduled sequence after the model ran: the target's choices, one more than there are drafts."""

    entry: ScheduledSequence
    choices: tuple[OutputToken, ...]
    has_failed: bool


class DecodeEngine:
    def __init__(
        self,
        runner: ModelRunner,
        scheduler: DecodeScheduler,
        proposer: Proposer,
        speculation: SpeculationSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.totals = DecodeTotals()
        self._runner = runner
        self._proposer = proposer
        self._speculation = speculation
        self._clock = clock
        self._listeners: dict[Sequence, SequenceListener] = {}
        self._ending: dict[Sequence, list[Future[int]]] = {}

    def submit(self, sequence: Sequence, listener: SequenceListener) -> None:
        """Queues a sequence whose prompt is computed here; the caller then wakes the engine."""
        with self.lock:
            self.scheduler.add(sequence)
            self._listeners[sequence] = listener

    def submit_received(self, sequence: Sequence, table: BlockTable, listener: SequenceListener) -> None:
        """Takes over a committed transfer's blocks. Precondition: the caller holds `lock` since the hand-over, so
        that the blocks have an owner at every instant."""
        self.scheduler.add_received(sequence, table)
        self._listeners[sequence] = listener

    def end(self, sequence: Sequence) -> Future[int]:
        """Gives back all that the sequence holds. The result is the number of blocks that became free."""
        future: Future[int] = Future()
        with self.lock:
            self._listeners.pop(sequence, None)
            num_freed = self.scheduler.end(sequence)
            if num_freed is None:
                self._ending.setdefault(sequence, []).append(future)
                return future
        future.set_result(num_freed)
        return future

    def step(self) -> bool:
        """One step; False when there was nothing to compute."""
        with self.lock:
            self._propose()
            decision = self.scheduler.schedule(self._clock())
            self.totals.num_preemptions += len(decision.preempted)
        if not decision.scheduled:
            return False
        start_s = self._clock()
        sampled = self._run(decision.scheduled)
        self._publish(sampled, start_s)
        return True

    def take_index_changes(self) -> IndexChanges:
        with self.lock:
            return self.scheduler.pool.take_changes()

    def count_held(self, hashes: list[BlockHash]) -> int:
        """Leading blocks of `hashes` that are held here."""
        with self.lock:
            return len(self.scheduler.pool.lookup(hashes))

    def held_hashes(self) -> list[BlockHash]:
        with self.lock:
            return self.scheduler.pool.held_hashes()

    def load(self) -> EngineLoad:
        """The accounts at one instant."""
        with self.lock:
            pool = self.scheduler.pool
            return EngineLoad(
                free_blocks=pool.num_available,
                cached_blocks=pool.num_cached,
                reserved_blocks=pool.num_reserved,
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                queued_tokens=self.scheduler.queued_tokens,
            )

    def check_integrity(self) -> None:
        with self.lock:
            self.scheduler.check_integrity()

    def _propose(self) -> None:
        running = self.scheduler.running
        is_worthwhile = len(running) <= self._speculation.max_batch
        for sequence in running:
            sequence.draft_token_ids = ()
            room = min(self._speculation.max_draft_tokens, sequence.max_new_tokens - 1)
            if is_worthwhile and room > 0 and sequence.is_decoding and sequence.sampling.speculation:
                sequence.draft_token_ids = self._proposer.propose(sequence.tokens(0, sequence.num_tokens), room)

    def _run(self, entries: tuple[ScheduledSequence, ...]) -> list[_Sampled]:
        result = self._runner.run([scheduled_tokens(entry) for entry in entries])
        choices = sample(result.logits, [row for entry in entries for row in sample_rows(entry)])
        ranges = row_ranges(entries)
        return [
            _Sampled(entry, tuple(choices[rows.start : rows.end]), failed)
            for entry, rows, failed in zip(entries, ranges, result.failed, strict=True)
        ]

    def _publish(self, sampled: list[_Sampled], start_s: float) -> None:
        end_s = self._clock()
        with self.lock:
            self.totals.num_steps += 1
            for item in sampled:
                if not item.entry.sequence.is_cancelled:
                    self._publish_one(item, start_s, end_s)
            for sequence, num_freed in self.scheduler.end_step().items():
                for future in self._ending.pop(sequence, []):
                    future.set_result(num_freed)

    def _publish_one(self, item: _Sampled, start_s: float, end_s: float) -> None:
        sequence = item.entry.sequence
        if item.has_failed:
            self._fail(sequence)
            return
        output = self._confirm(item, start_s, end_s)
        listener = self._listeners[sequence]
        if output.finish_reason is not None:
            sequence.is_cancelled = True  # its blocks go back when the step ends
            del self._listeners[sequence]
        listener.on_step(output)

    def _confirm(self, item: _Sampled, start_s: float, end_s: float) -> StepOutput:
        """Appends the tokens that stand: accepted drafts and the bonus token, cut where one ends the sequence."""
        sequence, entry = item.entry.sequence, item.entry
        num_accepted = count_accepted(entry.draft_token_ids, item.choices) if item.choices else 0
        first_position = len(sequence.output_token_ids)
        tokens: list[OutputToken] = []
        finish_reason: FinishReason | None = None
        for choice in item.choices[: num_accepted + 1]:
            tokens.append(choice)
            finish_reason = sequence.append(choice.token_id)
            if finish_reason is not None:
                break
        output = StepOutput(
            tokens=tuple(tokens),
            first_position=first_position,
            finish_reason=finish_reason,
            num_prompt_tokens=min(entry.num_tokens, max(0, len(sequence.prompt_token_ids) - entry.start)),
            num_drafted=len(entry.draft_token_ids),
            num_accepted=min(num_accepted, len(tokens)),
            start_s=start_s,
            end_s=end_s,
        )
        self.scheduler.complete(entry, output.num_accepted)
        self._count(sequence, output)
        return output

    def _count(self, sequence: Sequence, output: StepOutput) -> None:
        num_tokens, num_drafted, num_accepted = len(output.tokens), output.num_drafted, output.num_accepted
        sequence.num_computed_prompt_tokens += output.num_prompt_tokens
        self.totals.computed_prompt_tokens += output.num_prompt_tokens
        if num_tokens and not sequence.first_token_s:
            sequence.first_token_s = output.end_s
            self.totals.cached_prompt_tokens += sequence.num_cached_tokens
        sequence.num_target_passes += bool(num_tokens)
        sequence.num_draft_tokens += num_drafted
        sequence.num_accepted_tokens += num_accepted
        self.totals.output_tokens += num_tokens
        self.totals.num_draft_tokens += num_drafted
        self.totals.num_accepted_tokens += num_accepted

    def _fail(self, sequence: Sequence) -> None:
        sequence.is_cancelled = True
        listener = self._listeners.pop(sequence, None)
        if listener is not None:
            listener.on_failed(
                NumericFailure(f"{sequence.request_id}: NaN or Inf in the model's values; nothing of it was kept")
            )
