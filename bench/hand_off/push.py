"""Pushes of one prompt's blocks into a decode worker's pool, and the same bytes through raw gRPC, in turn."""

import os
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
import torch

from bench.hand_off.processes import BenchFailed, Receivers
from bench.hand_off.report import PushTimes
from bench.hand_off.sink import METHOD, SERVICE
from common.ids import BlockId, mint_transfer_id
from common.kv.cache import KVCache
from common.kv.wire import frame_runs
from common.pb import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.convert import layout_from_pb
from prefill_svc.kv_sender import KVSender

START_TIMEOUT_S = 300.0
WARM_UP_ROUNDS = 2
_LOADED_BYTES = 30 * 2**20


async def measure_pushes(receivers: Receivers, lengths: Sequence[int], num_rounds: int) -> list[PushTimes]:
    """Raises BenchFailed where a receiver did not get, or did not keep, what was sent."""
    _settle_allocator()
    decode, sink = open_channel(receivers.decode_address), open_channel(receivers.sink_address)
    try:
        info = await worker_pb2_grpc.WorkerStub(decode).Describe(
            worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S
        )
        pairs = [_Pair(decode, sink, info.identity, length) for length in lengths]
        for number in range(num_rounds + WARM_UP_ROUNDS):
            for pair in pairs:
                await pair.run(raw_first=number % 2 == 0, is_kept=number >= WARM_UP_ROUNDS)
        return [pair.times for pair in pairs]
    finally:
        await decode.close(None)
        await sink.close(None)


def _settle_allocator() -> None:
    """As in a worker that has loaded its model: glibc keeps freed memory of a size once it has freed that size."""
    np.zeros(_LOADED_BYTES, np.uint8)


class _Pair:
    def __init__(
        self,
        decode: grpc.aio.Channel,
        sink: grpc.aio.Channel,
        identity: types_pb2.ModelIdentity,
        num_tokens: int,
    ) -> None:
        self._channel = decode
        self._identity = identity
        layout = layout_from_pb(identity.layout)
        num_blocks = layout.num_blocks(num_tokens)
        self._block_ids = [BlockId(number) for number in range(num_blocks)]
        self._cache = KVCache(layout, num_blocks, torch.device("cpu"))
        self._cache.write_blocks(self._block_ids, os.urandom(num_blocks * layout.block_bytes))
        runs = frame_runs(0, num_blocks, layout)
        self._messages = [self._cache.read_blocks(range(start, end), num_tokens) for start, end in runs]
        self._take = sink.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
        self.times = PushTimes(num_tokens, num_blocks * layout.block_bytes)

    async def run(self, *, raw_first: bool, is_kept: bool) -> None:
        raw_s = await self._raw() if raw_first else None
        push_s = await self._push()
        raw_s = await self._raw() if raw_s is None else raw_s
        if is_kept:
            self.times.raw_s.append(raw_s)
            self.times.push_s.append(push_s)

    async def _raw(self) -> float:
        started_s = time.perf_counter()
        answer = await self._take(_stream(self._messages))
        taken_s = time.perf_counter() - started_s
        if int(answer) != self.times.num_bytes:
            raise BenchFailed(f"the sink got {int(answer)} bytes of {self.times.num_bytes}")
        return taken_s

    async def _push(self) -> float:
        """From the first block to the acknowledged commit: every block is in decode's pool then."""
        num_tokens, num_blocks, transfer_id = self.times.num_tokens, len(self._block_ids), mint_transfer_id()
        ticket = await decode_pb2_grpc.DecodeStub(self._channel).Reserve(
            decode_pb2.ReserveRequest(
                transfer_id=transfer_id,
                generation=1,
                fingerprint=self._identity.fingerprint,
                layout=self._identity.layout,
                num_prompt_tokens=num_tokens,
            )
        )
        sender = KVSender(self._channel, "decode", self._cache, ticket.ticket, 0, lambda *_: None)
        try:
            started_s = time.perf_counter()
            await sender.push(self._block_ids, num_blocks, num_tokens)
            await sender.commit(decode_pb2.Commit(num_prompt_tokens=num_tokens, num_blocks=num_blocks))
            taken_s = time.perf_counter() - started_s
        finally:
            await sender.close()
        released = await worker_pb2_grpc.WorkerStub(self._channel).Release(
            worker_pb2.ReleaseRequest(transfer_id=transfer_id, generation=1)
        )
        if released.freed_blocks != num_blocks:
            raise BenchFailed(f"decode held {released.freed_blocks} blocks of the {num_blocks} that were pushed")
        return taken_s


async def _stream(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
