"""The prefill engine: one step is schedule -> run -> sample -> publish. Knows no network and no telemetry.

Thread safety: `submit`, `end` and `status` may be called from any thread; `step` from the engine's thread alone. The
lock guards the scheduler and is never held while the model runs.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from common.engine_load import EngineLoad, EngineTotals
from common.errors import NumericFailure, TwostrokeError
from common.ids import BlockHash
from common.kv.block_pool import IndexChanges
from common.model.batch import ScheduledTokens
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from common.sampling import FinishReason, OutputToken
from prefill_svc.job import PrefillJob
from prefill_svc.scheduler import PrefillScheduler, ScheduledChunk


class JobListener(Protocol):
    """Told of a job's progress, in the engine's thread. Must not block."""

    def on_chunk(self, num_tokens: int, num_full_blocks: int, start_s: float, end_s: float) -> None:
        """A chunk was computed; the job's first `num_full_blocks` blocks will not change any more."""

    def on_first_token(self, token: OutputToken, finish_reason: FinishReason | None) -> None: ...

    def on_failed(self, error: TwostrokeError) -> None:
        """The job has ended and holds nothing."""


class PrefillEngine:
    def __init__(
        self, runner: ModelRunner, scheduler: PrefillScheduler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: dict[PrefillJob, JobListener] = {}
        self._ending: dict[PrefillJob, list[Future[int]]] = {}
        self.totals = EngineTotals()

    def submit(self, job: PrefillJob, listener: JobListener) -> None:
        """Queues a job; the caller then wakes the engine. Raises BadRequest or NoRoom."""
        with self._lock:
            self._scheduler.add(job)
            self._listeners[job] = listener

    def end(self, job: PrefillJob) -> Future[int]:
        """Gives back all that the job holds. The result is the number of blocks that became free."""
        future: Future[int] = Future()
        with self._lock:
            self._listeners.pop(job, None)
            num_freed = self._scheduler.end(job)
            if num_freed is None:
                self._ending.setdefault(job, []).append(future)
                return future
        future.set_result(num_freed)
        return future

    def step(self) -> bool:
        """One step; False when there was nothing to compute."""
        with self._lock:
            chunks = self._scheduler.schedule(self._clock())
        if not chunks:
            return False
        start_s = self._clock()
        result = self._runner.run([_scheduled_tokens(chunk) for chunk in chunks])
        finished = [chunk.job for chunk in chunks if chunk.completes_prompt]
        tokens = sample(result.logits, [_sample_row(job) for job in finished])
        self._publish(chunks, result.failed, dict(zip(finished, tokens, strict=True)), start_s)
        return True

    def take_index_changes(self) -> IndexChanges:
        with self._lock:
            return self._scheduler.pool.take_changes()

    def count_held(self, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks of `hashes` that are held here."""
        with self._lock:
            return len(self._scheduler.pool.lookup(hashes))

    def held_hashes(self) -> list[BlockHash]:
        with self._lock:
            return self._scheduler.pool.held_hashes()

    def load(self) -> EngineLoad:
        """The accounts at one instant."""
        with self._lock:
            pool = self._scheduler.pool
            return EngineLoad(
                free_blocks=pool.num_available,
                cached_blocks=pool.num_cached,
                reserved_blocks=pool.num_reserved,
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                queued_tokens=self._scheduler.queued_tokens,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._scheduler.check_integrity()

    def _publish(
        self,
        chunks: tuple[ScheduledChunk, ...],
        failed: Sequence[bool],
        tokens: dict[PrefillJob, OutputToken],
        start_s: float,
    ) -> None:
        end_s = self._clock()
        with self._lock:
            for chunk, has_failed in zip(chunks, failed, strict=True):
                chunk.job.is_cancelled |= has_failed
            ended = self._scheduler.complete(chunks)
            self.totals.num_steps += 1
            self.totals.computed_prompt_tokens += sum(chunk.num_tokens for chunk in chunks)
            for chunk in chunks:
                if chunk.job in ended:
                    self._tell_ended(chunk.job, ended[chunk.job])
                else:
                    self._tell_progress(chunk, tokens.get(chunk.job), start_s, end_s)

    def _tell_ended(self, job: PrefillJob, num_freed: int) -> None:
        """The job was cancelled during the step (someone waits for the count), or the step found NaN or Inf in it."""
        for future in self._ending.pop(job, []):
            future.set_result(num_freed)
        listener = self._listeners.pop(job, None)
        if listener is not None:
            listener.on_failed(NumericFailure(f"{job.request_id}: NaN or Inf in the model's values; nothing was kept"))

    def _tell_progress(self, chunk: ScheduledChunk, token: OutputToken | None, start_s: float, end_s: float) -> None:
        job = chunk.job
        listener = self._listeners[job]
        listener.on_chunk(chunk.num_tokens, job.table.num_hashed, start_s, end_s)
        if token is not None:
            self.totals.cached_prompt_tokens += job.num_cached_tokens
            self.totals.output_tokens += 1
            listener.on_first_token(token, _finish_reason(job, token))


def _scheduled_tokens(chunk: ScheduledChunk) -> ScheduledTokens:
    job = chunk.job
    return ScheduledTokens(
        token_ids=job.token_ids[chunk.start : chunk.start + chunk.num_tokens],
        start=chunk.start,
        block_ids=job.table.block_ids,
        num_logits=1 if chunk.completes_prompt else 0,
    )


def _sample_row(job: PrefillJob) -> SampleRow:
    return SampleRow(
        params=job.sampling,
        output_position=job.num_output_tokens,
        prompt_token_ids=job.prompt_token_ids,
        output_token_ids=job.output_token_ids,
    )


def _finish_reason(job: PrefillJob, token: OutputToken) -> FinishReason | None:
    if token.token_id in job.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if job.num_output_tokens + 1 >= job.sampling.max_tokens else None
