"""Pushes one job's blocks to decode while later chunks still compute, sends again what did not arrive, and commits.

            chunk 1      chunk 2      chunk 3
    compute ████████████ ████████████ ████████████
    push                 ▒▒▒▒ 0..n1   ▒▒▒▒ n1..n2   ▒▒▒▒ n2..n + commit

Owns the PushBlocks call, nothing else: the job's blocks are freed by whoever started the push, after it has ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from common.errors import TransferError, TwostrokeError
from common.ids import BlockId
from common.kv.quantizing import BlockSource
from common.kv.wire import Frame, frame_runs, make_commit_frame, make_frame
from common.pb import decode_pb2
from common.rpc.push import push_call
from common.rpc.status import ERROR_KEY, metadata_dict, rpc_error_to_exception
from prefill_svc.sent_blocks import Run, SentBlocks

MAX_QUEUED_FRAMES = 2
ASK_AGAIN_S = 1.0
"""A commit that nobody answers is repeated after this time: it may have been lost. The answer names what else was."""


class KVSender:
    """One hand-off. Blocks before `first_block` are on the other side already.

    A frame is made when gRPC's flow control takes the one before it, and the runs that wait for it are few, so a slow
    receiver slows the sender and a transfer costs a bounded amount of memory. `on_frame(num_bytes,
    num_refetched_blocks)` hears of each.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer: str,
        source: BlockSource,
        ticket: bytes,
        first_block: int,
        on_frame: Callable[[int, int], None],
    ) -> None:
        self._push = push_call(channel)
        self._peer = peer
        self._source = source
        self._ticket = ticket
        self._first_block = first_block
        self._next_block = first_block
        self._on_frame = on_frame
        self._block_ids: Sequence[BlockId] = ()
        self._num_valid_tokens = 0
        self._new: deque[Run] = deque()  # at most MAX_QUEUED_FRAMES
        self._again: deque[Run] = deque()  # a run that is sent again, in frames
        self._ahead: Frame | None = None  # made while the one before it is on its way
        self._sent = SentBlocks(peer)
        self._commit: decode_pb2.Commit | None = None
        self._is_commit_due = False
        self._is_closed = False
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()  # in `_new`; or the call has ended
        self._transfer: asyncio.Task[None] | None = None
        self._call: grpc.aio.StreamStreamCall[Frame, decode_pb2.PushAck] | None = None  # once the task has begun
        self.num_bytes_pushed = 0

    @property
    def num_blocks_pushed(self) -> int:
        return self._next_block - self._first_block

    async def push(self, block_ids: Sequence[BlockId], num_ready: int, num_valid_tokens: int) -> None:
        """Sends the blocks up to `num_ready` that were not sent yet.

        `num_valid_tokens`: positions of the whole prompt that are computed; what lies past them is sent as zeros.
        Raises TransferError or PeerLost.
        """
        self._block_ids = block_ids
        self._num_valid_tokens = num_valid_tokens
        for start, end in frame_runs(self._next_block, num_ready, self._source.layout):
            await self._hand_over(Run(start, end))
            self._next_block = end

    async def commit(self, commit: decode_pb2.Commit) -> None:
        """Ends the transfer; returns once decode has acknowledged that it holds every block."""
        self._commit = commit
        transfer = self._begun_transfer()
        while not transfer.done():
            self._is_commit_due = True
            self._has_work.set()
            await asyncio.wait({transfer}, timeout=ASK_AGAIN_S)
        transfer.result()

    async def close(self) -> None:
        """Ends the call, if it is still open, and returns when nothing of it runs any more. Idempotent.

        The call is cancelled, not the task that reads it: that would leave memory of gRPC's core behind.
        """
        self._is_closed = True
        self._has_work.set()  # gRPC's own task reads the frames; it must not wait for ever
        if self._transfer is not None:
            (self._call or self._transfer).cancel()
            await asyncio.gather(self._transfer, return_exceptions=True)

    def _begun_transfer(self) -> "asyncio.Task[None]":
        if self._transfer is None:
            self._transfer = asyncio.create_task(self._run_transfer())
            self._transfer.add_done_callback(lambda _: self._has_room.set())
        return self._transfer

    async def _hand_over(self, run: Run) -> None:
        transfer = self._begun_transfer()
        while len(self._new) >= MAX_QUEUED_FRAMES and not transfer.done():
            self._has_room.clear()
            await self._has_room.wait()
        if transfer.done():
            transfer.result()
        self._new.append(run)
        self._has_work.set()

    async def _run_transfer(self) -> None:
        """The call from its first frame to the acknowledged commit."""
        call = self._call = self._push(self._frames())
        try:
            async for ack in call:
                if ack.committed:
                    return
                self._on_ack(ack)
        except grpc.aio.AioRpcError as error:
            raise _translate(error, self._peer) from None
        finally:
            call.cancel()  # a reader that is cancelled before the first answer does not do it
        raise TransferError(f"{self._peer} ended the transfer without acknowledging the commit")

    def _on_ack(self, ack: decode_pb2.PushAck) -> None:
        """Raises CorruptFrame when a block has been sent often enough."""
        missing = [Run(run.first_block, run.first_block + run.num_blocks) for run in ack.missing]
        damaged = Run(ack.damaged.first_block, ack.damaged.first_block + ack.damaged.num_blocks)
        is_short = self._sent.reported(ack.sequence_number, missing, damaged)
        if self._commit is not None and (is_short or ack.HasField("damaged")):
            self._is_commit_due = True
        self._has_work.set()

    async def _frames(self) -> AsyncIterator[Frame]:
        """What is to be sent again goes first, the commit last."""
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            frame, self._ahead = self._ahead or self._next_block_frame(), None
            if frame is not None:
                loop.call_soon(self._make_ahead)  # while gRPC has this one on its way
                yield frame
            elif self._is_commit_due and self._commit is not None:
                self._is_commit_due = False
                yield self._with_ticket(make_commit_frame(self._sent.number_frame(), self._commit))
            else:
                self._has_work.clear()
                await self._has_work.wait()

    def _make_ahead(self) -> None:
        """One frame at most, so that memory stays bounded; none of a closed call: its blocks may be others' by now."""
        if self._is_closed or self._ahead is not None:
            return
        self._ahead = self._next_block_frame()
        if self._ahead is not None:
            self._ahead.encode_ahead()

    def _next_block_frame(self) -> Frame | None:
        if not self._again and (again := self._sent.take_again()) is not None:
            self._again.extend(Run(*run) for run in frame_runs(again.start, again.end, self._source.layout))
        if self._again:
            run = self._again.popleft()
            return self._block_frame(run, num_refetched_blocks=run.end - run.start)
        if self._new:
            self._has_room.set()
            return self._block_frame(self._new.popleft(), num_refetched_blocks=0)
        return None

    def _block_frame(self, run: Run, *, num_refetched_blocks: int) -> Frame:
        num_valid_tokens = self._num_valid_tokens - run.start * self._source.layout.block_size
        parts = self._source.view_blocks(self._block_ids[run.start : run.end], num_valid_tokens)
        frame = make_frame(self._sent.number_frame(run), run.start, run.end - run.start, *parts)
        self.num_bytes_pushed += frame.num_payload_bytes
        self._on_frame(frame.num_payload_bytes, num_refetched_blocks)
        return self._with_ticket(frame)

    def _with_ticket(self, frame: Frame) -> Frame:
        """In every frame: the first one may be lost."""
        frame.head.ticket = self._ticket
        return frame


_BROKEN_CALL = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})


def _translate(error: grpc.aio.AioRpcError, peer: str) -> TwostrokeError:
    """A peer that ends the call while frames are on their way is heard with its own reason, or, where the transport
    was quicker, with a status that says nothing: the transfer failed, and nobody is known to be lost."""
    was_reported = ERROR_KEY in metadata_dict(error.trailing_metadata())
    if not was_reported and error.code() in _BROKEN_CALL:
        return TransferError(f"{peer} ended the transfer ({error.code().name}: {error.details()})")
    return rpc_error_to_exception(error, peer)
