"""The Prefill service's edge: checks a request, runs it as a job, gives everything back at its end."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from common.errors import BadRequest, Draining, FingerprintMismatch
from common.ids import RequestId, TransferId, transfer_id_of
from common.kv.block_hash import block_hashes, root_hash
from common.kv.quantizing import BlockSource
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.rpc.channel import Connector
from common.rpc.cleanup import Cleanups
from common.rpc.convert import sampling_from_pb
from common.telemetry.context import current_context
from common.telemetry.recorder import SpanRecorder
from common.telemetry.setup import Telemetry
from prefill_svc.channels import ChannelPool
from prefill_svc.engine import PrefillEngine
from prefill_svc.hand_off import HandOff, QueueListener
from prefill_svc.job import PrefillJob
from prefill_svc.kv_sender import KVSender

log = logging.getLogger("twostroke.prefill")


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    fingerprint: bytes
    sources: Mapping[bytes, BlockSource]  # by fingerprint of the decode worker that blocks are sent to
    vocab_size: int
    max_model_len: int


@dataclass(slots=True)
class _ActiveJob:
    generation: int
    hand_off: HandOff
    freed: asyncio.Future[int]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(
        self,
        engine: PrefillEngine,
        wake_engine: Callable[[], None],
        limits: PrefillLimits,
        telemetry: Telemetry,
        connector: Connector,
    ) -> None:
        self._engine = engine
        self._wake_engine = wake_engine
        self._limits = limits
        self._telemetry = telemetry
        self._channels = ChannelPool(connector)
        self._cleanups = Cleanups()
        self._active: dict[TransferId, _ActiveJob] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self.kv_bytes_pushed = 0
        self.num_refetched_blocks = 0

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def Run(
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        if self._is_draining:
            raise Draining("this prefill worker is draining; use another")
        job = self._make_job(request)
        listener = QueueListener(asyncio.get_running_loop())
        self._engine.submit(job, listener)
        hand_off = HandOff(
            job,
            listener.events,
            self._make_sender(request),
            SpanRecorder(self._telemetry, current_context()),
            lambda: self._engine.totals.num_steps,
        )
        active = self._enter(job, request.generation, hand_off)
        self._wake_engine()
        events = hand_off.run()
        try:
            async for event in events:
                yield event
        finally:
            await self._cleanups.run(self._leave(job, active, events))

    async def release(self, transfer_id: bytes, generation: int) -> int:
        """Ends the transfer's job, if it is of this generation or an older one; returns how many blocks became free."""
        active = self._active.get(TransferId(transfer_id))
        if active is None or active.generation > generation:
            return 0
        active.hand_off.cancel()
        return await asyncio.shield(active.freed)

    async def drain(self) -> None:
        """Takes no new job; returns when the last one has been handed off."""
        self._is_draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """Closes the channels to decode workers."""
        await self._channels.close()

    def _make_job(self, request: prefill_pb2.PrefillRequest) -> PrefillJob:
        self._check(request)
        token_ids = (*request.token_ids, *request.output_token_ids)
        root = root_hash(request.fingerprint, request.tenant_salt)
        return PrefillJob(
            request_id=RequestId(request.request_id),
            transfer_id=transfer_id_of(request.transfer_id),
            token_ids=token_ids,
            sampling=sampling_from_pb(request.sampling),
            block_hashes=block_hashes(root, token_ids, self._limits.sources[request.fingerprint].layout.block_size),
            arrived_s=time.monotonic(),
            num_output_tokens=len(request.output_token_ids),
        )

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        limits = self._limits
        if request.fingerprint not in limits.sources:
            raise FingerprintMismatch(
                f"the request is for model {request.fingerprint.hex()}, this worker serves {limits.fingerprint.hex()}"
            )
        num_tokens = len(request.token_ids) + len(request.output_token_ids)
        if not request.token_ids or num_tokens >= limits.max_model_len:
            raise BadRequest(
                f"the prompt has {num_tokens} tokens; allowed: 1 to {limits.max_model_len - 1}", param="prompt"
            )
        largest = max([*request.token_ids, *request.output_token_ids, *request.sampling.logit_bias])
        if largest >= limits.vocab_size:
            raise BadRequest(f"token id {largest} is outside the vocabulary of {limits.vocab_size}", param="prompt")
        if request.transfer_id in self._active:
            raise BadRequest(f"transfer {request.transfer_id.hex()} is running already", param="transfer_id")

    def _make_sender(self, request: prefill_pb2.PrefillRequest) -> KVSender | None:
        if not request.decode_address:
            return None
        return KVSender(
            channel=self._channels.get(request.decode_address),
            peer=f"decode worker {request.decode_address}",
            source=self._limits.sources[request.fingerprint],
            ticket=request.ticket,
            first_block=request.num_held_blocks,
            on_frame=self._count_frame,
        )

    def _count_frame(self, num_bytes: int, num_refetched_blocks: int) -> None:
        self.kv_bytes_pushed += num_bytes
        self.num_refetched_blocks += num_refetched_blocks

    def _enter(self, job: PrefillJob, generation: int, hand_off: HandOff) -> _ActiveJob:
        active = _ActiveJob(generation, hand_off, asyncio.get_running_loop().create_future())
        self._active[job.transfer_id] = active
        self._idle.clear()
        return active

    async def _leave(
        self, job: PrefillJob, active: _ActiveJob, events: AsyncGenerator[prefill_pb2.PrefillEvent, None]
    ) -> None:
        await events.aclose()  # from here on nobody reads the job's blocks
        num_freed = await asyncio.wrap_future(self._engine.end(job))
        if not active.freed.done():
            active.freed.set_result(num_freed)
        del self._active[job.transfer_id]
        await self._channels.trim()
        if not self._active:
            self._idle.set()
