"""A Sequence and the states it may pass through. Pure data.

Positions, for a sequence of `num_tokens` tokens (prompt and output):

    [0, num_computed_tokens)            KV is valid
    [num_computed_tokens, num_tokens)   to be computed; exactly one when the sequence is decoding
    num_tokens                          the position whose token comes next
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from common.ids import BlockHash, RequestId, TransferId
from common.kv.block_table import BlockTable
from common.sampling import FinishReason, SamplingParams


class SequenceState(Enum):
    WAITING = auto()  # holds no blocks: new, or preempted
    RUNNING = auto()  # in the batch
    ENDED = auto()  # holds no blocks


LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.ENDED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: RequestId
    transfer_id: TransferId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    root_hash: BlockHash
    arrived_s: float  # monotonic; when decode may begin
    max_model_len: int
    output_token_ids: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, reused from this pool at the first admission
    draft_token_ids: tuple[int, ...] = ()
    started_s: float = 0.0  # monotonic; first step
    first_token_s: float = 0.0  # monotonic; first token sampled here
    is_cancelled: bool = False  # its blocks are freed when the step that reads them has ended
    was_admitted: bool = False
    num_computed_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_target_passes: int = 0
    num_refetched_blocks: int = 0  # of the transfer that brought it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining_tokens == 1 and bool(self.output_token_ids)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that may still be sampled before the length ends the sequence."""
        return min(self.sampling.max_tokens - len(self.output_token_ids), self.max_model_len - self.num_tokens)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens at positions [start, end), prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return [
            *self.prompt_token_ids[start:end],
            *self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)],
        ]

    def append(self, token_id: int) -> FinishReason | None:
        """Confirms one sampled token; says whether it ends the sequence."""
        self.output_token_ids.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.max_new_tokens <= 0 else None

    def move_to(self, state: SequenceState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state
