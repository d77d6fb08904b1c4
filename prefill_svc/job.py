"""A PrefillJob and the states it may pass through. Pure data.

`token_ids` are all that is computed: the prompt, and the output that the client has from an earlier attempt.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from common.ids import BlockHash, RequestId, TransferId
from common.kv.block_table import BlockTable
from common.sampling import SamplingParams


class JobState(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()  # holds all its blocks; chunks are being computed
    COMPUTED = auto()  # every position is computed; its blocks wait for the hand-off
    ENDED = auto()  # holds no blocks: handed off, failed or cancelled


LEGAL_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.WAITING: frozenset({JobState.RUNNING, JobState.ENDED}),
    JobState.RUNNING: frozenset({JobState.COMPUTED, JobState.ENDED}),
    JobState.COMPUTED: frozenset({JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class PrefillJob:
    request_id: RequestId
    transfer_id: TransferId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    block_hashes: list[BlockHash]  # of the full blocks
    arrived_s: float  # monotonic
    table: BlockTable = field(default_factory=BlockTable)
    state: JobState = JobState.WAITING
    num_output_tokens: int = 0  # the last ones of `token_ids`
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    started_s: float = 0.0  # monotonic; when the first chunk was scheduled
    is_cancelled: bool = False  # its blocks are freed when the step that reads them has ended

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[: len(self.token_ids) - self.num_output_tokens]

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_output_tokens :]

    @property
    def num_remaining_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def move_to(self, state: JobState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state
