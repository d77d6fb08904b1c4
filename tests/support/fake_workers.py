"""Prefill and decode workers without a model, over real gRPC. `check_integrity` says that nothing is held any more."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from common.errors import CorruptFrame, FingerprintMismatch, StaleGeneration, TransferError, UnknownTransfer
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2, worker_pb2
from common.rpc.channel import open_channel
from common.rpc.convert import finish_to_pb
from common.rpc.status import rpc_error_to_exception
from common.sampling import FinishReason
from tests.support.fake_worker import LAYOUT, FakeWorker, finish_of, token_at


@dataclass
class _Reservation:
    generation: int
    num_blocks: int
    committed: asyncio.Future[types_pb2.OutputToken]


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Points: reserve, reserved, pushing, committed, generate, token<n> (before output position n), tokens_sent.

    `tokens_per_event` tokens go into one event, as speculation makes them.
    """

    role = worker_pb2.ROLE_DECODE

    def __init__(self, worker_id: str, *, tokens_per_event: int = 1) -> None:
        super().__init__(worker_id)
        self.tokens_per_event = tokens_per_event
        self.reservations: dict[bytes, _Reservation] = {}
        self.sequences: dict[bytes, int] = {}
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.num_held_blocks = 0
        self.num_cached_tokens = 0
        self.num_refetched_blocks = 0

    @property
    def num_open(self) -> int:
        return len(self.reservations) + len(self.sequences)

    def check_integrity(self) -> None:
        assert not self.reservations, f"{self.worker_id}: {len(self.reservations)} reservations are left"
        assert not self.sequences, f"{self.worker_id}: {len(self.sequences)} sequences are left"

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.Ticket:
        await self.points.reach("reserve")
        self._refuse_new()
        if request.fingerprint != self.fingerprint:
            raise FingerprintMismatch("another model")
        self._refuse_released(request.transfer_id, request.generation)
        if request.transfer_id in self.reservations or request.transfer_id in self.sequences:
            raise StaleGeneration("the transfer is on record; release it first")
        future: asyncio.Future[types_pb2.OutputToken] = asyncio.get_running_loop().create_future()
        num_blocks = -(-request.num_prompt_tokens // LAYOUT.block_size)
        self.reservations[request.transfer_id] = _Reservation(request.generation, num_blocks, future)
        await self.points.reach("reserved")
        return decode_pb2.Ticket(ticket=request.transfer_id, num_held_blocks=self.num_held_blocks, lease_s=30.0)

    async def PushBlocks(
        self, request_iterator: AsyncIterator[decode_pb2.PushFrame], context: object
    ) -> AsyncIterator[decode_pb2.PushAck]:
        reservation: _Reservation | None = None
        async for frame in request_iterator:
            await self.points.reach("pushing")
            reservation = reservation or self.reservations.get(frame.ticket)
            if reservation is None:
                raise UnknownTransfer("no such reservation")
            if frame.HasField("commit"):
                if not reservation.committed.done():
                    reservation.committed.set_result(frame.commit.first_token)
                await self.points.reach("committed")
                yield decode_pb2.PushAck(sequence_number=frame.sequence_number, committed=True)
                return
        raise CorruptFrame("no commit came")

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        self.requests.append(request)
        await self.points.reach("generate")
        self._refuse_released(request.transfer_id, request.generation)
        if request.ticket:
            sent = await self._committed(request)
        else:
            self._refuse_new()
            sent = list(request.output_token_ids)
        self.sequences[request.transfer_id] = request.generation
        try:
            async for event in self._stream(request, sent):
                yield event
        finally:
            self.sequences.pop(request.transfer_id, None)

    async def _committed(self, request: decode_pb2.GenerateRequest) -> list[int]:
        reservation = self.reservations.get(request.transfer_id)
        if request.ticket != request.transfer_id or reservation is None:
            raise UnknownTransfer("no such ticket")
        first_token = await reservation.committed
        self.reservations.pop(request.transfer_id, None)
        return [*request.output_token_ids, first_token.token_id]

    async def _stream(
        self, request: decode_pb2.GenerateRequest, sent: list[int]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        num_cached = 0 if request.ticket else self.num_cached_tokens
        finish: FinishReason | None = None
        is_first = True
        while finish is None:
            event = decode_pb2.GenerateEvent(first_position=len(sent))
            while finish is None and len(event.tokens) < self.tokens_per_event:
                await self.points.reach(f"token{len(sent)}")
                token = token_at(request.token_ids, request.sampling.seed, len(sent))
                sent.append(token)
                event.tokens.append(types_pb2.OutputToken(token_id=token))
                finish = finish_of(request.sampling, token, len(sent))
            event.finish_reason = finish_to_pb(finish)
            if is_first or finish is not None:
                event.stats.num_cached_tokens = num_cached
                event.stats.num_refetched_blocks = self.num_refetched_blocks
                event.stats.queue_s, event.stats.prefill_s = 0.25, 0.5
            is_first = False
            yield event
        await self.points.reach("tokens_sent")

    def _release(self, transfer_id: bytes, generation: int) -> int:
        num_freed = 0
        reservation = self.reservations.get(transfer_id)
        if reservation is not None and reservation.generation <= generation:
            if not reservation.committed.done():
                reservation.committed.set_exception(TransferError("released"))
                reservation.committed.exception()  # nobody may be waiting for it
            num_freed = self.reservations.pop(transfer_id).num_blocks
        if self.sequences.get(transfer_id, generation + 1) <= generation:
            del self.sequences[transfer_id]
            num_freed += 1
        return num_freed

    def _forget(self) -> None:
        self.reservations.clear()
        self.sequences.clear()

    def _add_services(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """Points: run, computed (before the first token is sent), first_token (after it), handed_off."""

    role = worker_pb2.ROLE_PREFILL

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.jobs: dict[bytes, int] = {}
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.num_cached_tokens = 0

    @property
    def num_open(self) -> int:
        return len(self.jobs)

    def check_integrity(self) -> None:
        assert not self.jobs, f"{self.worker_id}: {len(self.jobs)} jobs are left"

    async def Run(
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.requests.append(request)
        await self.points.reach("run")
        self._refuse_new()
        self._refuse_released(request.transfer_id, request.generation)
        if request.transfer_id in self.jobs:
            raise StaleGeneration("the transfer is running already")
        self.jobs[request.transfer_id] = request.generation
        try:
            await self.points.reach("computed")
            num_output = len(request.output_token_ids)
            token = token_at(request.token_ids, request.sampling.seed, num_output)
            finish = finish_of(request.sampling, token, num_output + 1)
            yield self._first_token(token, finish)
            if finish is None:
                await self.points.reach("first_token")
                await self._commit(request, token)
                yield prefill_pb2.PrefillEvent(handed_off=prefill_pb2.HandedOff(num_blocks_pushed=1))
                await self.points.reach("handed_off")
        finally:
            self.jobs.pop(request.transfer_id, None)

    def _first_token(self, token: int, finish: FinishReason | None) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(
            first_token=prefill_pb2.FirstToken(
                token=types_pb2.OutputToken(token_id=token),
                finish_reason=finish_to_pb(finish),
                num_cached_tokens=self.num_cached_tokens,
                queue_s=0.25,
                prefill_s=0.5,
            )
        )

    async def _commit(self, request: prefill_pb2.PrefillRequest, token: int) -> None:
        commit = decode_pb2.Commit(
            first_token=types_pb2.OutputToken(token_id=token), num_prompt_tokens=len(request.token_ids), num_blocks=1
        )

        async def frames() -> AsyncIterator[decode_pb2.PushFrame]:
            yield decode_pb2.PushFrame(ticket=request.ticket, commit=commit)

        async with open_channel(request.decode_address) as channel:
            try:
                async for ack in decode_pb2_grpc.DecodeStub(channel).PushBlocks(frames()):
                    assert ack.committed
            except grpc.aio.AioRpcError as error:
                raise rpc_error_to_exception(error, f"decode worker {request.decode_address}") from None

    def _release(self, transfer_id: bytes, generation: int) -> int:
        if self.jobs.get(transfer_id, generation + 1) <= generation:
            del self.jobs[transfer_id]
            return 1
        return 0

    def _forget(self) -> None:
        self.jobs.clear()

    def _add_services(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
