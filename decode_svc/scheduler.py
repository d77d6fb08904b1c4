"""Which tokens the next step computes: running decodes first, then prompts in chunks, within a token budget.

Pure policy: returns decisions as data and owns the sequences' blocks. Sequences join and leave at every step. When a
running sequence finds no block, the one with the fewest generated tokens is preempted: it gives its blocks back and is
computed again later (most of its full blocks can then be found by their names).
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import BadRequest, NoRoom
from common.kv.block_hash import block_hash, block_hashes
from common.kv.block_pool import BlockPool
from common.kv.block_table import BlockTable
from decode_svc.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    block_size: int
    max_num_batched_tokens: int
    max_num_sequences: int
    max_waiting: int
    preemption_shield_tokens: int  # a sequence with this many generated tokens is preempted only as the last one


class ScheduledSequence(NamedTuple):
    """Positions [start, start + num_tokens) of one sequence, then its draft tokens."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft_token_ids: tuple[int, ...]
    samples: bool  # this step reaches the sequence's end, so that a token is sampled


@dataclass(frozen=True, slots=True)
class StepDecision:
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Sequence, ...]


class DecodeScheduler:
    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        assert limits.max_num_batched_tokens > 0
        assert limits.max_num_sequences > 0
        self.pool = pool
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._in_step: tuple[ScheduledSequence, ...] = ()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts (and of preempted sequences) still to compute."""
        return sum(s.num_remaining_tokens for s in (*self._running, *self._waiting) if not s.is_decoding)

    @property
    def preempted_blocks(self) -> int:
        """Blocks that preempted sequences need to go on: newcomers must not take them, or their clients would wait
        for as long as others come."""
        return sum(self._num_blocks(s.num_tokens + 1) for s in self._waiting if s.was_admitted)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is computed here. Raises BadRequest when it can never fit, NoRoom when the
        queue is full."""
        wanted = self._num_blocks(sequence.num_tokens + 1)
        if wanted > self.pool.num_blocks:
            raise BadRequest(
                f"{sequence.num_tokens} tokens need {wanted} KV blocks; this worker has {self.pool.num_blocks}",
                param="prompt",
            )
        if len(self._waiting) >= self._limits.max_waiting:
            raise NoRoom(f"{len(self._waiting)} sequences wait, the most that this worker allows", retry_after_s=1)
        self._waiting.append(sequence)

    def add_received(self, sequence: Sequence, table: BlockTable) -> None:
        """Takes over a committed transfer: every position but the last token's is in `table`'s blocks, which change
        owner. The sequence joins the batch at the next step; `max_num_sequences` was promised by its reservation."""
        sequence.table = table
        sequence.num_computed_tokens = sequence.num_tokens - 1
        sequence.was_admitted = True
        sequence.move_to(SequenceState.RUNNING)
        self._running.append(sequence)
        self._register_full_blocks(sequence)

    def schedule(self, now_s: float) -> StepDecision:
        """The next step. Precondition: the last one was completed."""
        assert not self._in_step
        budget = self._limits.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        for sequence in self._decodes_first():
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for one before it
            entry = self._fit(sequence, budget, scheduled, preempted)
            if entry is not None:
                scheduled.append(entry)
                budget -= entry.num_tokens + len(entry.draft_token_ids)
        while budget > 0 and self._waiting and not preempted and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            num_tokens = min(budget, sequence.num_remaining_tokens)
            samples = num_tokens == sequence.num_remaining_tokens
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, (), samples))
            budget -= num_tokens
        for entry in scheduled:
            entry.sequence.started_s = entry.sequence.started_s or now_s
        self._in_step = tuple(scheduled)
        return StepDecision(self._in_step, tuple(preempted))

    def complete(self, entry: ScheduledSequence, num_accepted: int) -> None:
        """`entry`'s step has run: its positions, and those of the accepted draft tokens, hold valid KV.

        Called after the sampled tokens were appended and before `end_step`, for sequences that were not cancelled.
        """
        sequence = entry.sequence
        sequence.num_computed_tokens = entry.start + entry.num_tokens + num_accepted
        self._register_full_blocks(sequence)

    def end_step(self) -> dict[Sequence, int]:
        """Ends the step; sequences cancelled meanwhile give their blocks back now: {sequence: blocks freed}."""
        entries, self._in_step = self._in_step, ()
        return {entry.sequence: self._end(entry.sequence) for entry in entries if entry.sequence.is_cancelled}

    def end(self, sequence: Sequence) -> int | None:
        """Gives back what `sequence` holds, in any state. Idempotent.

        Returns how many blocks became free, or None when the running step still reads them: `end_step` frees them.
        """
        if sequence.state is SequenceState.ENDED:
            return 0
        if any(entry.sequence is sequence for entry in self._in_step):
            sequence.is_cancelled = True
            return None
        return self._end(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError where the accounts do not add up."""
        self.pool.check_integrity()
        for sequence in self._waiting:
            assert not sequence.table.block_ids, f"{sequence.request_id} waits and holds blocks"

    def _decodes_first(self) -> list[Sequence]:
        """Running sequences: decodes in order of admission, then prompts in order of admission."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            (decodes if sequence.is_decoding else prompts).append(sequence)
        return decodes + prompts

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def _fit(
        self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence], preempted: list[Sequence]
    ) -> ScheduledSequence | None:
        """Finds blocks for as many of the sequence's tokens as the budget allows, preempting others if it must."""
        remaining, start = sequence.num_remaining_tokens, sequence.num_computed_tokens
        num_tokens = min(budget, remaining)
        samples = num_tokens == remaining
        drafts = sequence.draft_token_ids[: budget - num_tokens] if samples else ()
        # Draft tokens are worth a free block, never another sequence's.
        if drafts and not self._grow(sequence, start + num_tokens + len(drafts)):
            drafts = ()
        while not self._grow(sequence, start + num_tokens):
            victim = self._choose_victim(scheduled)
            if victim is None:
                return None
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return ScheduledSequence(sequence, start, num_tokens, drafts, samples)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self._num_blocks(num_tokens) - len(sequence.table.block_ids)
        if missing > self.pool.num_available:
            return False
        if missing > 0:
            sequence.table.block_ids.extend(self.pool.allocate(missing))
        return True

    def _choose_victim(self, scheduled: list[ScheduledSequence]) -> Sequence | None:
        """The running sequence with the fewest generated tokens that this step does not compute yet."""
        busy = {entry.sequence for entry in scheduled}
        candidates = [s for s in self._running if s not in busy]
        shield = self._limits.preemption_shield_tokens
        return min(candidates, key=lambda s: (len(s.output_token_ids) >= shield, len(s.output_token_ids)), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.pool.free(sequence.table.block_ids)
        sequence.table = BlockTable()
        sequence.num_computed_tokens = 0
        sequence.draft_token_ids = ()
        sequence.num_preemptions += 1
        sequence.move_to(SequenceState.WAITING)
        self._waiting.appendleft(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        if len(self._running) >= self._limits.max_num_sequences:
            return False
        # The last token is always computed: its logits give the next one.
        num_reusable = (sequence.num_tokens - 1) // self._limits.block_size
        tokens = sequence.tokens(0, num_reusable * self._limits.block_size)
        hashes = block_hashes(sequence.root_hash, tokens, self._limits.block_size)
        cached = self.pool.lookup(hashes)
        # One block more than the tokens need, so that a sequence does not enter to be preempted at once.
        num_new = self._num_blocks(sequence.num_tokens + 1) - len(cached)
        if num_new + self.pool.num_free_among(cached) > self.pool.num_available:
            return False
        self.pool.touch(cached)
        sequence.table = BlockTable([*cached, *self.pool.allocate(num_new)], hashes[: len(cached)])
        sequence.num_computed_tokens = len(cached) * self._limits.block_size
        if not sequence.was_admitted:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, len(sequence.prompt_token_ids))
            sequence.was_admitted = True
        sequence.move_to(SequenceState.RUNNING)
        self._running.append(sequence)
        return True

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Names the blocks that are full of confirmed tokens."""
        size = self._limits.block_size
        for index in range(sequence.table.num_hashed, sequence.num_computed_tokens // size):
            parent = sequence.table.hashes[-1] if sequence.table.hashes else sequence.root_hash
            name = block_hash(parent, sequence.tokens(index * size, (index + 1) * size))
            self.pool.register(sequence.table.block_ids[index], name)
            sequence.table.hashes.append(name)

    def _end(self, sequence: Sequence) -> int:
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.move_to(SequenceState.ENDED)
        num_freed = self.pool.free(sequence.table.block_ids)
        sequence.table = BlockTable()
        return num_freed
