"""The accounts of transfers on decode's side: reserved, receiving, committed, ended. Pure policy.

                 reserve                 first frame              commit             the sequence takes over
    (nothing) ─────────────► RESERVED ──────────────► RECEIVING ─────────► COMMITTED ─────────────────────────► ENDED
                                └───────────────────────┴──── release, expiry, broken push ┴──────────────────► ENDED

A reservation is a promise in the pool's accounts; blocks are taken as frames arrive. Held blocks (a prefix that is here
already) are touched when the room is reserved, so that they cannot be evicted meanwhile.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from common.errors import BadRequest, CorruptFrame, NoRoom, StaleGeneration, UnknownTransfer
from common.ids import BlockHash, BlockId, TransferId
from common.kv.block_pool import BlockPool
from common.kv.block_table import BlockTable

MAX_TRANSFERS = 4096
"""Transfers on record at once; beyond it reservations are refused, so the table's memory is bounded."""


class TransferState(Enum):
    RESERVED = auto()
    RECEIVING = auto()
    COMMITTED = auto()
    ENDED = auto()


LEGAL_TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    TransferState.RESERVED: frozenset({TransferState.RECEIVING, TransferState.COMMITTED, TransferState.ENDED}),
    TransferState.RECEIVING: frozenset({TransferState.COMMITTED, TransferState.ENDED}),
    TransferState.COMMITTED: frozenset({TransferState.ENDED}),
    TransferState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Transfer:
    transfer_id: TransferId
    generation: int
    num_prompt_tokens: int
    num_blocks: int
    held_hashes: list[BlockHash]
    block_ids: list[BlockId]  # blocks 0 .. len - 1 are here: held ones, then received ones, in order
    last_progress_s: float  # monotonic
    state: TransferState = TransferState.RESERVED

    @property
    def num_held_blocks(self) -> int:
        return len(self.held_hashes)

    @property
    def num_missing_blocks(self) -> int:
        return self.num_blocks - len(self.block_ids)

    def move_to(self, state: TransferState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], f"transfer: {self.state.name} -> {state.name}"
        self.state = state


@dataclass(slots=True)
class TransferTable:
    pool: BlockPool
    block_size: int
    _transfers: dict[TransferId, Transfer] = field(default_factory=dict)
    # Highest generation released, of the latest transfers: a Reserve that its own Release has overtaken is refused.
    _released: OrderedDict[TransferId, int] = field(default_factory=OrderedDict)

    def reserve(
        self,
        transfer_id: TransferId,
        generation: int,
        num_prompt_tokens: int,
        hashes: list[BlockHash],
        now_s: float,
        *,
        kept_blocks: int = 0,
    ) -> Transfer:
        """Promises room for the prompt, where there is one block more to grow into. Raises NoRoom, BadRequest or
        StaleGeneration, and then nothing has changed. `kept_blocks` are left for sequences that wait already."""
        self._refuse_stale(transfer_id, generation)
        num_blocks = -(-num_prompt_tokens // self.block_size)
        num_with_next = -(-(num_prompt_tokens + 1) // self.block_size)
        if num_with_next > self.pool.num_blocks:
            raise BadRequest(
                f"the prompt of {num_prompt_tokens} tokens needs {num_with_next} KV blocks; this worker has "
                f"{self.pool.num_blocks}",
                param="prompt",
            )
        if len(self._transfers) >= MAX_TRANSFERS:
            raise NoRoom(f"{MAX_TRANSFERS} transfers are open, the most that this worker allows", retry_after_s=1)
        held = self.pool.lookup(hashes[: num_prompt_tokens // self.block_size])
        num_promised = num_blocks - len(held)
        # A prompt that leaves room in the pool's very last block grows in there.
        num_to_grow = int(num_blocks < self.pool.num_blocks)
        wanted = num_promised + num_to_grow + self.pool.num_free_among(held)
        num_available = max(0, self.pool.num_available - kept_blocks)
        if wanted > num_available:
            raise NoRoom(
                f"{wanted} KV blocks wanted, {num_available} available of {self.pool.num_blocks}",
                retry_after_s=1,
            )
        self.pool.touch(held)
        self.pool.reserve(num_promised)
        transfer = Transfer(transfer_id, generation, num_prompt_tokens, num_blocks, hashes[: len(held)], held, now_s)
        self._transfers[transfer_id] = transfer
        return transfer

    def find(self, transfer_id: TransferId, generation: int) -> Transfer:
        """Raises UnknownTransfer, or StaleGeneration for a late frame of an older generation."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise UnknownTransfer(f"transfer {transfer_id.hex()} is not open here: it ended or never began")
        if transfer.generation != generation:
            raise StaleGeneration(
                f"transfer {transfer_id.hex()}: generation {generation} came, {transfer.generation} is current"
            )
        return transfer

    def take_blocks(self, transfer: Transfer, first_block: int, num_blocks: int, now_s: float) -> list[BlockId]:
        """Blocks for a frame's run; they are written next. Raises CorruptFrame where the run is not the next one."""
        if first_block != len(transfer.block_ids) or not 0 < num_blocks <= transfer.num_missing_blocks:
            raise CorruptFrame(
                f"blocks {first_block} to {first_block + num_blocks} came; {len(transfer.block_ids)} is next of "
                f"{transfer.num_blocks}"
            )
        block_ids = self.pool.allocate(num_blocks, from_reserved=num_blocks)
        transfer.block_ids.extend(block_ids)
        transfer.last_progress_s = now_s
        if transfer.state is TransferState.RESERVED:
            transfer.move_to(TransferState.RECEIVING)
        return block_ids

    def commit(self, transfer: Transfer, num_blocks: int, num_prompt_tokens: int) -> None:
        """Every block is here. Raises CorruptFrame where the sender's counts differ from the reservation."""
        if (
            num_blocks != transfer.num_blocks
            or transfer.num_missing_blocks
            or num_prompt_tokens != transfer.num_prompt_tokens
        ):
            raise CorruptFrame(
                f"commit of {num_blocks} blocks and {num_prompt_tokens} tokens; {len(transfer.block_ids)} blocks are "
                f"here, {transfer.num_blocks} blocks and {transfer.num_prompt_tokens} tokens were reserved"
            )
        transfer.move_to(TransferState.COMMITTED)

    def hand_over(self, transfer: Transfer) -> BlockTable:
        """The blocks of a committed transfer change owner; the transfer ends."""
        assert transfer.state is TransferState.COMMITTED
        table = BlockTable(transfer.block_ids, list(transfer.held_hashes))
        self._close(transfer)
        return table

    def release(self, transfer: Transfer) -> int:
        """Gives back the promise and the blocks; returns how many became free. Idempotent."""
        if transfer.state is TransferState.ENDED:
            return 0
        self.pool.unreserve(transfer.num_missing_blocks)
        num_freed = self.pool.free(transfer.block_ids)
        self._close(transfer)
        return num_freed

    def note_released(self, transfer_id: TransferId, generation: int) -> None:
        """Generations up to this one must not begin any more, also where none is open: the two may cross on the way."""
        generation = max(generation, self._released.pop(transfer_id, 0))
        self._released[transfer_id] = generation
        if len(self._released) > MAX_TRANSFERS:
            self._released.popitem(last=False)

    def open_transfers(self) -> list[Transfer]:
        return list(self._transfers.values())

    def _refuse_stale(self, transfer_id: TransferId, generation: int) -> None:
        known = self._transfers.get(transfer_id)
        if known is not None:
            raise StaleGeneration(
                f"transfer {transfer_id.hex()} is on record with generation {known.generation}; release it first"
            )
        if generation <= self._released.get(transfer_id, -1):
            raise StaleGeneration(f"transfer {transfer_id.hex()}: generation {generation} was released already")

    def _close(self, transfer: Transfer) -> None:
        transfer.move_to(TransferState.ENDED)
        del self._transfers[transfer.transfer_id]
