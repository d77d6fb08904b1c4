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
    hashes: list[BlockHash]  # of the full blocks, as the reservation named them
    num_held_blocks: int
    blocks: dict[int, BlockId]  # logical block -> block id, of those that are here: held, or received and verified
    last_progress_s: float  # monotonic
    state: TransferState = TransferState.RESERVED
    is_confirmed: bool = False  # `hashes` are those of the request's tokens
    asked_again: set[int] = field(default_factory=set)  # blocks that were lost or damaged on their way

    @property
    def block_ids(self) -> list[BlockId]:
        return [self.blocks[index] for index in sorted(self.blocks)]

    @property
    def held_hashes(self) -> list[BlockHash]:
        return self.hashes[: self.num_held_blocks]

    @property
    def num_missing_blocks(self) -> int:
        return self.num_blocks - len(self.blocks)

    @property
    def num_leading_blocks(self) -> int:
        """Blocks [0, n) are here."""
        return next((index for index in range(self.num_blocks) if index not in self.blocks), self.num_blocks)

    def missing(self, *, to_the_end: bool) -> list[tuple[int, int]]:
        """Half-open runs of blocks that are not here, up to the last one that is, or of all."""
        end = self.num_blocks if to_the_end else max(self.blocks, default=-1) + 1
        runs: list[tuple[int, int]] = []
        if len(self.blocks) == end:
            return runs
        for index in range(end):
            if index in self.blocks:
                continue
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs

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
        named = hashes[: num_prompt_tokens // self.block_size]
        held = self.pool.lookup(named)
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
        blocks = dict(enumerate(held))
        transfer = Transfer(
            transfer_id, generation, num_prompt_tokens, num_blocks, named, len(held), blocks, last_progress_s=now_s
        )
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

    def take_blocks(self, transfer: Transfer, first_block: int, num_blocks: int, now_s: float) -> dict[int, BlockId]:
        """Blocks for those of a verified frame's run that are not here yet, by logical block; they are written next.
        What is here stays as it is. Raises CorruptFrame where the run is not of this reservation."""
        end_block = first_block + num_blocks
        if not 0 <= first_block < end_block <= transfer.num_blocks:
            raise CorruptFrame(f"blocks {first_block} to {end_block} came; {transfer.num_blocks} blocks were reserved")
        new = [index for index in range(first_block, end_block) if index not in transfer.blocks]
        taken = dict(zip(new, self.pool.allocate(len(new), from_reserved=len(new)), strict=True))
        transfer.blocks.update(taken)
        if taken:
            transfer.last_progress_s = now_s
        if transfer.state is TransferState.RESERVED:
            transfer.move_to(TransferState.RECEIVING)
        return taken

    def check_commit(self, transfer: Transfer, num_blocks: int, num_prompt_tokens: int) -> None:
        """Raises CorruptFrame where the sender's counts differ from the reservation."""
        if (num_blocks, num_prompt_tokens) != (transfer.num_blocks, transfer.num_prompt_tokens):
            raise CorruptFrame(
                f"commit of {num_blocks} blocks and {num_prompt_tokens} tokens; {transfer.num_blocks} blocks and "
                f"{transfer.num_prompt_tokens} tokens were reserved"
            )

    def commit(self, transfer: Transfer) -> None:
        """Precondition: every block is here, and the commit was checked."""
        assert not transfer.num_missing_blocks
        transfer.move_to(TransferState.COMMITTED)

    def hand_over(self, transfer: Transfer) -> BlockTable:
        """The blocks of a committed transfer change owner; the transfer ends."""
        assert transfer.state is TransferState.COMMITTED
        table = BlockTable(transfer.block_ids, list(transfer.held_hashes))
        self._close(transfer)
        return table

    def release(self, transfer: Transfer) -> int:
        """Gives back the promise and the blocks; returns how many became free. Idempotent.

        The verified blocks at the head can still be found by their names, so that whoever computes this text here
        begins after the last good one.
        """
        if transfer.state is TransferState.ENDED:
            return 0
        if transfer.is_confirmed:
            for index, name in enumerate(transfer.hashes[: transfer.num_leading_blocks]):
                self.pool.register(transfer.blocks[index], name)
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
