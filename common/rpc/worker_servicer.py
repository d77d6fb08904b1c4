"""The Worker service, the same for both roles: who it is, its load, its tokenizer, release, drain, what it holds."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from common.ids import BlockHash
from common.pb import worker_pb2, worker_pb2_grpc
from common.rpc.tokenizer_chunks import tokenizer_chunks

MIN_STATUS_INTERVAL_S = 0.01


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """`status` is asked at most once an interval for each watcher; `release` answers how many blocks it freed,
    `begin_drain` within how many seconds the worker will be gone."""

    def __init__(
        self,
        info: worker_pb2.WorkerInfo,
        tokenizer_files: Mapping[str, bytes],
        status: Callable[[], worker_pb2.WorkerStatus],
        release: Callable[[bytes, int], Awaitable[int]],
        begin_drain: Callable[[], float],
        count_held: Callable[[list[BlockHash]], int],
    ) -> None:
        self._info = info
        self._tokenizer_files = tokenizer_files
        self._status = status
        self._release = release
        self._begin_drain = begin_drain
        self._count_held = count_held

    async def Describe(self, request: worker_pb2.DescribeRequest, context: object) -> worker_pb2.WorkerInfo:
        return self._info

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: object
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        interval_s = max(MIN_STATUS_INTERVAL_S, request.interval_ms / 1000)
        sent: worker_pb2.WorkerStatus | None = None
        while True:
            status = self._status()
            if status != sent:
                sent = status
                yield status
            await asyncio.sleep(interval_s)

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: object
    ) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        for chunk in tokenizer_chunks(self._tokenizer_files):
            yield chunk

    async def Release(self, request: worker_pb2.ReleaseRequest, context: object) -> worker_pb2.ReleaseReply:
        return worker_pb2.ReleaseReply(freed_blocks=await self._release(request.transfer_id, request.generation))

    async def Drain(self, request: worker_pb2.DrainRequest, context: object) -> worker_pb2.DrainReply:
        return worker_pb2.DrainReply(grace_s=self._begin_drain())

    async def CountHeld(self, request: worker_pb2.CountHeldRequest, context: object) -> worker_pb2.CountHeldReply:
        hashes = [BlockHash(name) for name in request.block_hashes]
        return worker_pb2.CountHeldReply(num_held_blocks=self._count_held(hashes))
