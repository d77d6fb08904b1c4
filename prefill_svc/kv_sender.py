"""Pushes one job's blocks to decode while later chunks still compute, and commits.

            chunk 1      chunk 2      chunk 3
    compute ████████████ ████████████ ████████████
    push                 ▒▒▒▒ 0..n1   ▒▒▒▒ n1..n2   ▒▒▒▒ n2..n + commit

Owns the PushBlocks call, nothing else: the job's blocks are freed by whoever started the push, after it has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from common.errors import TransferError
from common.ids import BlockId
from common.kv.cache import KVCache
from common.kv.wire import frame_runs, make_frame
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc.status import rpc_error_to_exception

MAX_QUEUED_FRAMES = 2


class KVSender:
    """One hand-off. Blocks before `first_block` are on the other side already.

    Frames wait in a short queue until gRPC's flow control takes them, so a slow receiver slows the sender and a
    transfer costs a bounded amount of memory.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer: str,
        cache: KVCache,
        ticket: bytes,
        first_block: int,
        on_frame: Callable[[int], None],
    ) -> None:
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._peer = peer
        self._cache = cache
        self._ticket = ticket
        self._first_block = first_block
        self._next_block = first_block
        self._on_frame = on_frame
        self._sequence_number = 0
        self.num_bytes_pushed = 0
        self._frames: asyncio.Queue[decode_pb2.PushFrame | None] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._call: asyncio.Task[None] | None = None

    @property
    def num_blocks_pushed(self) -> int:
        return self._next_block - self._first_block

    async def push(self, block_ids: Sequence[BlockId], num_ready: int, num_valid_tokens: int) -> None:
        """Sends the blocks up to `num_ready` that were not sent yet.

        `num_valid_tokens`: positions of the whole prompt that are computed; what lies past them is sent as zeros.
        Raises TransferError or PeerLost.
        """
        block_size = self._cache.layout.block_size
        for start, end in frame_runs(self._next_block, num_ready, self._cache.layout):
            payload = self._cache.read_blocks(block_ids[start:end], num_valid_tokens - start * block_size)
            await self._send(make_frame(self._sequence_number, start, end - start, payload))
            self.num_bytes_pushed += len(payload)
            self._next_block = end
            self._on_frame(len(payload))

    async def commit(self, commit: decode_pb2.Commit) -> None:
        """Ends the transfer; returns once decode has acknowledged that it holds every block."""
        await self._send(decode_pb2.PushFrame(sequence_number=self._sequence_number, commit=commit))
        await self._frames.put(None)
        assert self._call is not None
        await self._call

    async def close(self) -> None:
        """Ends the call, if it is still open, and returns when nothing of it runs any more. Idempotent."""
        if self._call is None:
            return
        self._call.cancel()
        # gRPC's own task reads the frames; without a last one it would wait for ever.
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(None)
        await asyncio.gather(self._call, return_exceptions=True)

    async def _send(self, frame: decode_pb2.PushFrame) -> None:
        if self._call is None:
            frame.ticket = self._ticket
            self._call = asyncio.create_task(self._transfer())
        self._sequence_number += 1
        put = asyncio.ensure_future(self._frames.put(frame))
        try:
            await asyncio.wait({put, self._call}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()
        if self._call.done():
            self._call.result()

    async def _transfer(self) -> None:
        """The call from its first frame to the acknowledged commit."""
        call = self._stub.PushBlocks(self._queued_frames())
        try:
            async for ack in call:
                if ack.committed:
                    return
        except grpc.aio.AioRpcError as error:
            raise rpc_error_to_exception(error, self._peer) from None
        finally:
            call.cancel()  # a reader that is cancelled before the first answer does not do it
        raise TransferError(f"{self._peer} ended the transfer without acknowledging the commit")

    async def _queued_frames(self) -> AsyncIterator[decode_pb2.PushFrame]:
        while (frame := await self._frames.get()) is not None:
            yield frame
