"""Which prompt tokens the next step computes: first come, first served, in chunks, within a token budget.

Pure policy: returns decisions as data, owns the jobs' blocks, is told the time. A job gets all blocks of its prompt
when it is admitted, so a running job never waits for room and admission cannot deadlock.
"""

from collections import deque
from dataclasses import dataclass

from common.errors import BadRequest, NoRoom
from common.kv.block_pool import BlockPool
from prefill_svc.job import JobState, PrefillJob

MIN_SPLIT_CHUNKS = 4
"""A last chunk is split where it is longer than this many short ones; for less, one step more is not worth it."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, start + num_tokens) of one job."""

    job: PrefillJob
    start: int
    num_tokens: int

    @property
    def completes_prompt(self) -> bool:
        return self.start + self.num_tokens == len(self.job.token_ids)


class PrefillScheduler:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        last_chunk_tokens: int | None = None,
    ) -> None:
        """`last_chunk_tokens`: of a long prompt (and less than a block more). None: the budget alone decides."""
        assert max_num_batched_tokens > 0
        self.pool = pool
        self._block_size = block_size
        self._token_budget = max_num_batched_tokens
        self._max_waiting = max_waiting
        self._last_chunk_tokens = last_chunk_tokens
        self._waiting: deque[PrefillJob] = deque()
        self._running: list[PrefillJob] = []  # in order of admission
        self._computed: set[PrefillJob] = set()
        self._in_step: tuple[ScheduledChunk, ...] = ()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._computed)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute, over all jobs."""
        return sum(job.num_remaining_tokens for job in (*self._running, *self._waiting))

    def add(self, job: PrefillJob) -> None:
        """Queues a job. Raises BadRequest for a prompt that can never fit, NoRoom when the queue is full."""
        wanted = self._num_blocks(job)
        if wanted > self.pool.num_blocks:
            raise BadRequest(
                f"the prompt of {len(job.token_ids)} tokens needs {wanted} KV blocks; this worker has "
                f"{self.pool.num_blocks}",
                param="prompt",
            )
        if len(self._waiting) >= self._max_waiting:
            raise NoRoom(f"{len(self._waiting)} prompts are queued, the most that this worker allows", retry_after_s=1)
        self._waiting.append(job)

    def schedule(self, now_s: float) -> tuple[ScheduledChunk, ...]:
        """The next step's chunks; empty when there is nothing to compute. Precondition: the last step was completed."""
        assert not self._in_step
        budget = self._token_budget
        chunks: list[ScheduledChunk] = []
        for job in self._running:
            if budget == 0:
                break
            budget -= self._take(job, budget, chunks)
        while budget > 0 and self._waiting and self._admit(self._waiting[0], now_s):
            job = self._waiting.popleft()
            budget -= self._take(job, budget, chunks)
        self._in_step = tuple(chunks)
        return self._in_step

    def complete(self, chunks: tuple[ScheduledChunk, ...]) -> dict[PrefillJob, int]:
        """The step has run: its positions are computed and its full blocks can be found by others.

        Returns the jobs that were cancelled meanwhile, with how many blocks became free.
        """
        assert chunks is self._in_step
        self._in_step = ()
        ended: dict[PrefillJob, int] = {}
        for chunk in chunks:
            job = chunk.job
            if job.is_cancelled:
                ended[job] = self._end(job)
                continue
            job.num_computed_tokens = chunk.start + chunk.num_tokens
            self._register_full_blocks(job)
            if job.num_remaining_tokens == 0:
                self._running.remove(job)
                self._computed.add(job)
                job.move_to(JobState.COMPUTED)
        return ended

    def end(self, job: PrefillJob) -> int | None:
        """Gives back what `job` holds, in any state: hand-off done, failed or cancelled. Idempotent.

        Returns how many blocks became free, or None when the running step still reads them: `complete` frees them.
        """
        if job.state is JobState.ENDED:
            return 0
        if any(chunk.job is job for chunk in self._in_step):
            job.is_cancelled = True
            return None
        return self._end(job)

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = sum(len(job.table.block_ids) for job in (*self._running, *self._computed))
        assert held >= self.pool.num_in_use, f"{self.pool.num_in_use} blocks in use, jobs hold {held}"
        assert held or self.pool.num_in_use == 0

    def _num_blocks(self, job: PrefillJob) -> int:
        return -(-len(job.token_ids) // self._block_size)

    def _admit(self, job: PrefillJob, now_s: float) -> bool:
        # The last prompt token is always computed: its logits give the first token.
        reusable = job.block_hashes[: (len(job.token_ids) - 1) // self._block_size]
        cached = self.pool.lookup(reusable)
        num_new = self._num_blocks(job) - len(cached)
        if num_new + self.pool.num_free_among(cached) > self.pool.num_available:
            return False
        self.pool.touch(cached)
        job.table.block_ids = [*cached, *self.pool.allocate(num_new)]
        job.table.hashes = reusable[: len(cached)]
        job.num_cached_tokens = job.num_computed_tokens = len(cached) * self._block_size
        job.started_s = now_s
        job.move_to(JobState.RUNNING)
        self._running.append(job)
        return True

    def _take(self, job: PrefillJob, budget: int, chunks: list[ScheduledChunk]) -> int:
        num_tokens = min(budget, job.num_remaining_tokens)
        if num_tokens == job.num_remaining_tokens:
            num_tokens -= self._num_left_for_last(job)
        chunks.append(ScheduledChunk(job, job.num_computed_tokens, num_tokens))
        return num_tokens

    def _num_left_for_last(self, job: PrefillJob) -> int:
        """Of the tokens that would be the last chunk. Blocks are sent while the next chunk computes; only those of the
        last one are waited for, so it should be short. The chunk before it ends with a block."""
        wanted = self._last_chunk_tokens
        if wanted is None or job.num_remaining_tokens <= MIN_SPLIT_CHUNKS * wanted:
            return 0
        return wanted + (len(job.token_ids) - wanted) % self._block_size

    def _register_full_blocks(self, job: PrefillJob) -> None:
        for index in range(job.table.num_hashed, job.num_computed_tokens // self._block_size):
            self.pool.register(job.table.block_ids[index], job.block_hashes[index])
            job.table.hashes.append(job.block_hashes[index])

    def _end(self, job: PrefillJob) -> int:
        if job.state is JobState.WAITING:
            self._waiting.remove(job)
        elif job.state is JobState.RUNNING:
            self._running.remove(job)
        else:
            self._computed.discard(job)
        job.move_to(JobState.ENDED)
        num_freed = self.pool.free(job.table.block_ids)
        job.table.block_ids = []
        return num_freed
