"""Pushes one job's blocks to decode while later chunks still compute, sends again what did not arrive, and commits.

            chunk 1      chunk 2      chunk 3
    compute ████████████ ████████████ ████████████
    push                 ▒▒▒▒ 0..n1   ▒▒▒▒ n1..n2   ▒▒▒▒ n2..n + commit

Owns the PushBlocks call, nothing else: the job's blocks are freed by whoever started the push, after it has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from common.errors import TransferError, TwostrokeError
from common.ids import BlockId
from common.kv.quantizing import BlockSource
from common.kv.wire import frame_runs, make_commit_frame, make_frame
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc.status import ERROR_KEY, metadata_dict, rpc_error_to_exception
from prefill_svc.sent_blocks import Run, SentBlocks

MAX_QUEUED_FRAMES = 2
ASK_AGAIN_S = 1.0
"""A commit that nobody answers is repeated after this time: it may have been lost. The answer names what else was."""


class KVSender:
    """One hand-off. Blocks before `first_block` are on the other side already.

    A frame is made when gRPC's flow control takes it, and the runs that wait for it are few, so a slow receiver slows
    the sender and a transfer costs a bounded amount of memory. `on_frame(num_bytes, num_refetched_blocks)` hears of
    each.
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
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._peer = peer
        self._source = source
        self._ticket = ticket
        self._first_block = first_block
        self._next_block = first_block
        self._on_frame = on_frame
        self._block_ids: Sequence[BlockId] = ()
        self._num_valid_tokens = 0
        self._new: asyncio.Queue[Run] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._sent = SentBlocks(peer)
        self._commit: decode_pb2.Commit | None = None
        self._is_commit_due = False
        self._is_closed = False
        self._has_work = asyncio.Event()
        self._call: asyncio.Task[None] | None = None
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
        call = self._opened_call()
        while not call.done():
            self._is_commit_due = True
            self._has_work.set()
            await asyncio.wait({call}, timeout=ASK_AGAIN_S)
        call.result()

    async def close(self) -> None:
        """Ends the call, if it is still open, and returns when nothing of it runs any more. Idempotent."""
        self._is_closed = True
        self._has_work.set()  # gRPC's own task reads the frames; it must not wait for ever
        if self._call is not None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)

    def _opened_call(self) -> "asyncio.Task[None]":
        if self._call is None:
            self._call = asyncio.create_task(self._transfer())
        return self._call

    async def _hand_over(self, run: Run) -> None:
        call = self._opened_call()
        put = asyncio.ensure_future(self._new.put(run))
        put.add_done_callback(lambda _: self._has_work.set())
        try:
            await asyncio.wait({put, call}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()
        if call.done():
            call.result()

    async def _transfer(self) -> None:
        """The call from its first frame to the acknowledged commit."""
        call = self._stub.PushBlocks(self._frames())
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

    async def _frames(self) -> AsyncIterator[decode_pb2.PushFrame]:
        """What is to be sent again goes first, the commit last."""
        while not self._is_closed:
            if (again := self._sent.take_again()) is not None:
                for start, end in frame_runs(again.start, again.end, self._source.layout):
                    yield self._block_frame(Run(start, end), num_refetched_blocks=end - start)
            elif not self._new.empty():
                yield self._block_frame(self._new.get_nowait(), num_refetched_blocks=0)
            elif self._is_commit_due and self._commit is not None:
                self._is_commit_due = False
                yield self._with_ticket(make_commit_frame(self._sent.number_frame(), self._commit))
            else:
                self._has_work.clear()
                await self._has_work.wait()

    def _block_frame(self, run: Run, *, num_refetched_blocks: int) -> decode_pb2.PushFrame:
        num_valid_tokens = self._num_valid_tokens - run.start * self._source.layout.block_size
        payload = self._source.read_blocks(self._block_ids[run.start : run.end], num_valid_tokens)
        self.num_bytes_pushed += len(payload)
        self._on_frame(len(payload), num_refetched_blocks)
        frame = make_frame(self._sent.number_frame(run), run.start, run.end - run.start, payload)
        return self._with_ticket(frame)

    def _with_ticket(self, frame: decode_pb2.PushFrame) -> decode_pb2.PushFrame:
        """In every frame: the first one may be lost."""
        frame.ticket = self._ticket
        return frame


_BROKEN_CALL = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})


def _translate(error: grpc.aio.AioRpcError, peer: str) -> TwostrokeError:
    """A peer that ends the call while frames are on their way is heard with its own reason, or, where the transport
    was quicker, with a status that says nothing: the transfer failed, and nobody is known to be lost."""
    was_reported = ERROR_KEY in metadata_dict(error.trailing_metadata())
    if not was_reported and error.code() in _BROKEN_CALL:
        return TransferError(f"{peer} ended the transfer ({error.code().name}: {error.details()})")
    return rpc_error_to_exception(error, peer)
