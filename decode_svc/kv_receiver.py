"""Receives the blocks of transfers: verifies every frame before a byte of it enters the pool, acknowledges it, asks for
what did not arrive whole, commits.

Runs in the event loop; the engine's lock guards the accounts. A transfer is open from its reservation to the hand-over
of its blocks to a sequence; `committed` tells whoever waits for it (the Generate call) how it ended.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import CorruptFrame, LeaseExpired, PushAbandoned, TransferError, TwostrokeError, UnknownTransfer
from common.ids import BlockHash, TransferId
from common.kv.block_table import BlockTable
from common.kv.cache import KVCache
from common.kv.wire import Frame, verified_payload
from common.logs import fields
from common.pb import decode_pb2
from decode_svc.engine import DecodeEngine
from decode_svc.ticket import TicketAuthority, TicketClaims
from decode_svc.transfer import Transfer, TransferState, TransferTable

log = logging.getLogger("twostroke.decode")

ACK_EVERY = 8
"""So many frames in a row may arrive whole until they are acknowledged: an answer to each would cost as much as a small
frame."""

MAX_DAMAGED_FRAMES = 256
"""A push with more is no push: its sender gives up long before."""


@dataclass(frozen=True, slots=True)
class AttachedTransfer:
    transfer: Transfer
    committed: "asyncio.Future[decode_pb2.Commit]"  # raises what ended the transfer otherwise

    @contextmanager
    def doubted(self) -> Iterator[None]:
        """Around checks of what the sender says. One who talks nonsense is not believed in its blocks either."""
        try:
            yield
        except TwostrokeError:
            self.transfer.is_confirmed = False
            raise


@dataclass(slots=True)
class _Open:
    """What the event loop keeps of an open transfer."""

    transfer: Transfer
    committed: asyncio.Future[decode_pb2.Commit]
    is_attached: bool = False  # a Generate call waits for it: alive as long as that call is
    is_pushing: bool = False
    commit: decode_pb2.Commit | None = None  # verified; takes effect when the last block is here
    highest_sequence_number: int = 0  # of the frames that arrived whole
    num_damaged_frames: int = 0
    num_unanswered_frames: int = 0

    def is_answer_due(self, ack: decode_pb2.PushAck) -> bool:
        """At once where something has to be sent again, or the sender waits for the commit."""
        self.num_unanswered_frames += 1
        is_urgent = bool(ack.missing) or ack.HasField("damaged") or self.commit is not None
        is_due = is_urgent or self.num_unanswered_frames >= ACK_EVERY
        if is_due:
            self.num_unanswered_frames = 0
        return is_due


class KVReceiver:
    def __init__(
        self,
        engine: DecodeEngine,
        table: TransferTable,
        cache: KVCache,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._table = table
        self._cache = cache
        self._lease_s = lease_s
        self._clock = clock
        self._tickets = TicketAuthority()
        self._open: dict[TransferId, _Open] = {}
        self.kv_bytes_received = 0
        self.num_refetched_blocks = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_waited_for(self, transfer_id: TransferId) -> bool:
        """A Generate call waits for this transfer's commit."""
        opened = self._open.get(transfer_id)
        return opened is not None and opened.is_attached

    def reserve(
        self, transfer_id: TransferId, generation: int, num_prompt_tokens: int, hashes: list[BlockHash]
    ) -> decode_pb2.Ticket:
        """Promises room. A retry with a higher generation ends the older one first. Raises NoRoom or BadRequest."""
        older = self._open.get(transfer_id)
        if older is not None and older.transfer.generation < generation:
            self._fail(older, TransferError(f"transfer {transfer_id.hex()}: replaced by generation {generation}"))
        with self._engine.lock:
            kept_blocks = self._engine.scheduler.preempted_blocks
            transfer = self._table.reserve(
                transfer_id, generation, num_prompt_tokens, hashes, self._clock(), kept_blocks=kept_blocks
            )
        committed: asyncio.Future[decode_pb2.Commit] = asyncio.get_running_loop().create_future()
        self._open[transfer_id] = _Open(transfer, committed)
        return decode_pb2.Ticket(
            ticket=self._tickets.issue(TicketClaims(transfer_id, generation)),
            num_held_blocks=transfer.num_held_blocks,
            lease_s=self._lease_s,
        )

    async def receive(self, frames: AsyncIterator[Frame]) -> AsyncGenerator[decode_pb2.PushAck, None]:
        """One push, from the ticket to the commit. A push that breaks ends its transfer; a frame that was damaged,
        lost, repeated or overtaken does not."""
        opened: _Open | None = None
        try:
            async for frame in frames:
                opened = opened or self._begin_push(frame.head.ticket)
                ack = self._take(opened, frame)
                if opened.is_answer_due(ack):
                    yield ack
                if ack.committed:
                    return
        except TwostrokeError as error:
            if opened is not None:
                opened.transfer.is_confirmed = False  # its sender talks nonsense: its blocks get no name
                self._fail(opened, error)
            raise
        finally:
            if opened is not None and opened.transfer.state is not TransferState.COMMITTED:
                self._fail(opened, PushAbandoned("the sender ended the transfer before its commit"))

    @contextmanager
    def attach(self, ticket: bytes) -> Iterator[AttachedTransfer]:
        """The transfer of `ticket`, for the one call that waits for it. What the call did not take over by its end
        is given back. Raises UnknownTransfer or StaleGeneration."""
        opened = self._find(ticket)
        if opened.is_attached:
            raise UnknownTransfer("another Generate call waits for this transfer")
        opened.is_attached = True
        try:
            yield AttachedTransfer(opened.transfer, opened.committed)
        finally:
            self._fail(opened, TransferError("the call that waited for this transfer went away"))

    def hand_over(self, transfer: Transfer) -> BlockTable:
        """The blocks of a committed transfer, for a sequence that takes them. Raises UnknownTransfer when it was
        released meanwhile. Precondition: the engine's lock is held."""
        if transfer.state is TransferState.ENDED:
            raise UnknownTransfer(f"transfer {transfer.transfer_id.hex()} was released")
        del self._open[transfer.transfer_id]
        return self._table.hand_over(transfer)

    def release(self, transfer_id: TransferId, generation: int) -> int:
        """Ends the transfer, if it is open with this generation or an older one; returns the blocks freed."""
        self._table.note_released(transfer_id, generation)
        opened = self._open.get(transfer_id)
        if opened is None or opened.transfer.generation > generation:
            return 0
        return self._fail(opened, TransferError(f"transfer {transfer_id.hex()} was released"))

    def expire(self) -> int:
        """Ends transfers that nobody waits for and that made no progress for a lease; returns how many."""
        limit_s = self._clock() - self._lease_s
        stale = [o for o in self._open.values() if not o.is_attached and o.transfer.last_progress_s < limit_s]
        for opened in stale:
            self._fail(opened, LeaseExpired(f"no progress for {self._lease_s:g} s and nobody waits; reserve again"))
        return len(stale)

    def _find(self, ticket: bytes) -> _Open:
        claims = self._tickets.verify(ticket)
        with self._engine.lock:
            self._table.find(claims.transfer_id, claims.generation)
        return self._open[claims.transfer_id]

    def _begin_push(self, ticket: bytes) -> _Open:
        opened = self._find(ticket)
        if opened.is_pushing:
            raise UnknownTransfer("this transfer is being pushed already")
        opened.is_pushing = True
        return opened

    def _take(self, opened: _Open, frame: Frame) -> decode_pb2.PushAck:
        if opened.transfer.state is TransferState.ENDED:
            raise UnknownTransfer("the transfer has ended")
        try:
            payload = verified_payload(frame, self._cache.layout)
        except CorruptFrame as error:
            return self._ask_again(opened, frame, error)
        head = frame.head
        opened.highest_sequence_number = max(opened.highest_sequence_number, head.sequence_number)
        if head.num_blocks:
            self._write(opened.transfer, head.first_block, head.num_blocks, payload)
        if head.HasField("commit"):
            self._table.check_commit(opened.transfer, head.commit.num_blocks, head.commit.num_prompt_tokens)
            opened.commit = head.commit
        if opened.commit is not None and not opened.transfer.num_missing_blocks:
            self._commit(opened, opened.commit)
        return self._acknowledge(opened)

    def _write(self, transfer: Transfer, first_block: int, num_blocks: int, payload: bytes | memoryview) -> None:
        with self._engine.lock:
            taken = self._table.take_blocks(transfer, first_block, num_blocks, self._clock())
        if len(taken) < num_blocks:  # some of them came before
            size = self._cache.layout.block_bytes
            payload = b"".join(payload[(i - first_block) * size : (i - first_block + 1) * size] for i in taken)
        if taken:
            self._cache.write_blocks(list(taken.values()), payload)
            self.kv_bytes_received += len(payload)

    def _commit(self, opened: _Open, commit: decode_pb2.Commit) -> None:
        if opened.transfer.state is TransferState.COMMITTED:
            return
        with self._engine.lock:
            self._table.commit(opened.transfer)
        if not opened.committed.done():
            opened.committed.set_result(commit)

    def _acknowledge(self, opened: _Open) -> decode_pb2.PushAck:
        transfer = opened.transfer
        runs = transfer.missing(to_the_end=opened.commit is not None)
        self._note_refetch(transfer, runs)
        return decode_pb2.PushAck(
            sequence_number=opened.highest_sequence_number,
            committed=transfer.state is TransferState.COMMITTED,
            missing=[decode_pb2.BlockRange(first_block=start, num_blocks=end - start) for start, end in runs],
        )

    def _ask_again(self, opened: _Open, frame: Frame, error: CorruptFrame) -> decode_pb2.PushAck:
        """What a damaged frame says of its place is a hint for the sender, who knows what it sent."""
        opened.num_damaged_frames += 1
        if opened.num_damaged_frames > MAX_DAMAGED_FRAMES:
            raise error
        level = logging.WARNING if opened.num_damaged_frames == 1 else logging.DEBUG
        log.log(level, "%s; asking for it again", error, extra=fields(transfer_id=opened.transfer.transfer_id.hex()))
        ack = self._acknowledge(opened)
        first_block, num_blocks = frame.head.first_block, frame.head.num_blocks
        end_block = first_block + num_blocks
        is_possible = first_block < end_block <= opened.transfer.num_blocks
        if is_possible:
            self._note_refetch(opened.transfer, [(first_block, end_block)])
        ack.damaged.CopyFrom(
            decode_pb2.BlockRange(first_block=first_block, num_blocks=num_blocks if is_possible else 0)
        )
        return ack

    def _note_refetch(self, transfer: Transfer, runs: list[tuple[int, int]]) -> None:
        wanted = {index for start, end in runs for index in range(start, end)}
        new = wanted - transfer.asked_again - transfer.blocks.keys()
        transfer.asked_again |= new
        self.num_refetched_blocks += len(new)

    def _fail(self, opened: _Open, error: TwostrokeError) -> int:
        """Gives everything back, and tells the Generate call. Idempotent."""
        if opened.transfer.state is TransferState.ENDED:
            return 0
        if self._open.get(opened.transfer.transfer_id) is opened:
            del self._open[opened.transfer.transfer_id]
        with self._engine.lock:
            num_freed = self._table.release(opened.transfer)
        if not opened.committed.done():
            opened.committed.set_exception(error)
            opened.committed.exception()  # retrieved: perhaps nobody waits
        return num_freed
