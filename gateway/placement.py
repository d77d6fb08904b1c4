"""Which workers a generation goes to. Pure: views of workers in, a choice out; the same input, the same choice.

Never chosen: a worker that is not ready or is draining. Staleness is allowed for: a worker may still refuse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import NoWorker

RUNNING_SEQUENCE_TOKENS = 64
"""A running sequence weighs as much as this many prompt tokens where one worker does both: its steps are shared."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class PlacementReason(StrEnum):
    LONGEST_PREFIX = "longest_prefix"  # the worker that computes the prompt holds more of it than any other
    LEAST_LOAD = "least_load"
    DECODE_ALONE = "decode_alone"  # no prefill worker takes part


class Fallback(StrEnum):
    """Why the planned way was left. The first three keep the way: the first its workers too."""

    BLOCKS_REFETCHED = "blocks_refetched"  # blocks of the transfer came damaged or not at all, and were sent again
    PREFILL_RETRIED = "prefill_retried"
    DECODE_RETRIED = "decode_retried"
    NO_PREFILL_WORKER = "no_prefill_worker"
    PREFILL_LOST = "prefill_lost"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_LOST = "decode_lost"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the gateway knows it now: its last status, and what this gateway sent it since."""

    worker_id: str
    address: str
    role: Role
    registration: int  # rises whenever the worker becomes ready again
    is_ready: bool
    is_draining: bool
    total_blocks: int
    free_blocks: int
    queued_tokens: int  # prompt tokens still to compute
    num_sequences: int  # running and waiting

    @property
    def takes_work(self) -> bool:
        return self.is_ready and not self.is_draining

    @property
    def in_use_share(self) -> float:
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What has to be placed."""

    num_tokens: int  # of the prompt, and of the output that the client has already
    block_size: int
    held_blocks: Mapping[str, int]  # worker_id -> leading blocks of the prompt that it holds

    @property
    def num_blocks(self) -> int:
        """Blocks for every token and the next one."""
        return self.num_tokens // self.block_size + 1

    def held(self, worker: WorkerView) -> int:
        return self.held_blocks.get(worker.worker_id, 0)

    def uncached_tokens(self, worker: WorkerView) -> int:
        """Tokens left to compute on `worker`; the last one is always computed, for its logits."""
        return max(1, self.num_tokens - self.held(worker) * self.block_size)


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: WorkerView | None
    decode: WorkerView
    reason: PlacementReason
    fallback: Fallback | None = None


def place(
    workers: Sequence[WorkerView], demand: Demand, *, prefill_wanted: bool, strict: bool, is_move: bool = False
) -> Placement:
    """Chooses a decode worker and, where `prefill_wanted`, a prefill worker.

    Without a prefill worker that takes work, the prompt is computed on decode (`no_prefill_worker`), unless `strict`.
    `is_move`: a text that was computed before; prefill takes part only where it has less left to compute than a decode
    worker alone, or where `strict`. Raises NoWorker when nobody can serve.
    """
    decode_workers = [worker for worker in workers if worker.role is Role.DECODE and worker.takes_work]
    prefill_workers = [worker for worker in workers if worker.role is Role.PREFILL and worker.takes_work]
    if not decode_workers:
        raise NoWorker("no decode worker is ready; retry in a moment", retry_after_s=1.0)
    if prefill_wanted and prefill_workers:
        prefill = min(prefill_workers, key=lambda worker: _prompt_cost(worker, demand))
        decode = min(decode_workers, key=lambda worker: _decode_cost(worker, demand))
        alone = min(decode_workers, key=lambda worker: _alone_cost(worker, demand))
        if is_move and not strict and _tokens_until_done(alone, demand) <= _tokens_until_done(prefill, demand):
            return Placement(None, alone, PlacementReason.DECODE_ALONE)
        return Placement(prefill, decode, _reason(prefill, prefill_workers, demand))
    if prefill_wanted and strict:
        raise NoWorker("no prefill worker is ready, and falling back is switched off (strict)", retry_after_s=1.0)
    decode = min(decode_workers, key=lambda worker: _alone_cost(worker, demand))
    fallback = Fallback.NO_PREFILL_WORKER if prefill_wanted else None
    return Placement(None, decode, PlacementReason.DECODE_ALONE, fallback)


def _prompt_cost(worker: WorkerView, demand: Demand) -> tuple[int, int, str, str]:
    """Tokens until this prompt is done; then the fewest sequences; then the name, so that ties have one answer."""
    return _tokens_until_done(worker, demand), worker.num_sequences, *_name(worker)


def _decode_cost(worker: WorkerView, demand: Demand) -> tuple[bool, float, int, str, str]:
    """Room first, then the share in use, then how much need not be sent."""
    return _lacks_room(worker, demand), worker.in_use_share, -demand.held(worker), *_name(worker)


def _alone_cost(worker: WorkerView, demand: Demand) -> tuple[bool, int, float, str, str]:
    work = _tokens_until_done(worker, demand) + worker.num_sequences * RUNNING_SEQUENCE_TOKENS
    return _lacks_room(worker, demand), work, worker.in_use_share, *_name(worker)


def _tokens_until_done(worker: WorkerView, demand: Demand) -> int:
    return worker.queued_tokens + demand.uncached_tokens(worker)


def _lacks_room(worker: WorkerView, demand: Demand) -> bool:
    return worker.free_blocks < demand.num_blocks - demand.held(worker)


def _name(worker: WorkerView) -> tuple[str, str]:
    return worker.worker_id, worker.address


def _reason(chosen: WorkerView, candidates: Sequence[WorkerView], demand: Demand) -> PlacementReason:
    held = demand.held(chosen)
    if held and held == max(demand.held(worker) for worker in candidates):
        return PlacementReason.LONGEST_PREFIX
    return PlacementReason.LEAST_LOAD
