"""The Decode service's edge: checks requests, ties transfers to sequences, gives everything back at their end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from common.errors import BadRequest, Cancelled, CorruptFrame, Draining, FingerprintMismatch
from common.ids import BlockHash, RequestId, TransferId, transfer_id_of
from common.kv.block_hash import block_hashes, root_hash
from common.kv.layout import KVLayout
from common.kv.wire import Frame
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc.cleanup import Cleanups
from common.rpc.convert import layout_from_pb, sampling_from_pb
from common.telemetry.context import current_context
from common.telemetry.recorder import SpanRecorder
from common.telemetry.setup import Telemetry
from decode_svc.engine import DecodeEngine
from decode_svc.kv_receiver import KVReceiver
from decode_svc.sequence import Sequence
from decode_svc.stream import QueueListener, SequenceStream
from decode_svc.transfer import Transfer

DRAIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    fingerprint: bytes
    layout: KVLayout
    vocab_size: int
    max_model_len: int


@dataclass(slots=True)
class _ActiveSequence:
    sequence: Sequence
    listener: QueueListener
    generation: int


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        engine: DecodeEngine,
        wake_engine: Callable[[], None],
        receiver: KVReceiver,
        limits: DecodeLimits,
        telemetry: Telemetry,
    ) -> None:
        self._engine = engine
        self._wake_engine = wake_engine
        self._receiver = receiver
        self._limits = limits
        self._telemetry = telemetry
        self._active: dict[TransferId, _ActiveSequence] = {}
        self._cleanups = Cleanups()
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.Ticket:
        self._refuse_when_draining()
        self._check_identity(request.fingerprint)
        layout = layout_from_pb(request.layout)
        if layout != self._limits.layout:
            raise FingerprintMismatch(
                f"the sender's KV layout is {layout.describe()}, this worker's is {self._limits.layout.describe()}"
            )
        self._check_prompt_length(request.num_prompt_tokens)
        return self._receiver.reserve(
            transfer_id_of(request.transfer_id),
            request.generation,
            request.num_prompt_tokens,
            [BlockHash(name) for name in request.block_hashes],
        )

    async def PushBlocks(
        self, request_iterator: AsyncIterator[Frame], context: object
    ) -> AsyncIterator[decode_pb2.PushAck]:
        async with aclosing(self._receiver.receive(request_iterator)) as acks:
            async for ack in acks:
                yield ack

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        if not request.ticket:
            self._refuse_when_draining()  # with a ticket the room was promised before
        self._check_identity(request.fingerprint)
        self._check_tokens(request)
        listener = QueueListener(asyncio.get_running_loop())
        self._num_calls += 1
        self._idle.clear()
        sequence: Sequence | None = None
        try:
            sequence = await self._begin(request, listener)
            self._wake_engine()
            spans = SpanRecorder(self._telemetry, current_context())
            stream = SequenceStream(sequence, listener.events, spans, lambda: self._engine.totals.num_steps)
            async with aclosing(stream.run()) as events:
                async for event in events:
                    yield event
        finally:
            await self._cleanups.run(self._leave(sequence))

    async def release(self, transfer_id: bytes, generation: int) -> int:
        """Ends the transfer or its sequence, whichever stage it is in; returns how many blocks became free."""
        num_freed = self._receiver.release(TransferId(transfer_id), generation)
        active = self._active.get(TransferId(transfer_id))
        if active is not None and active.generation <= generation:
            num_freed += await asyncio.wrap_future(self._engine.end(active.sequence))
            active.listener.on_failed(Cancelled(f"{active.sequence.request_id}: released by the gateway"))
        return num_freed

    async def drain(self) -> None:
        """Takes nothing new; returns when the last stream has ended and no transfer is open."""
        self._is_draining = True
        while self._num_calls or self._receiver.num_open:
            await self._idle.wait()
            await asyncio.sleep(DRAIN_POLL_S)  # a reservation's call may still come, or its lease end

    def load(self) -> tuple[int, int]:
        """(calls in flight, transfers open)."""
        return self._num_calls, self._receiver.num_open

    async def _begin(self, request: decode_pb2.GenerateRequest, listener: QueueListener) -> Sequence:
        if request.ticket:
            sequence = await self._begin_received(request, listener)
        else:
            sequence = self._make_sequence(request, list(request.output_token_ids))
            self._engine.submit(sequence, listener)
        self._active[sequence.transfer_id] = _ActiveSequence(sequence, listener, request.generation)
        return sequence

    async def _begin_received(self, request: decode_pb2.GenerateRequest, listener: QueueListener) -> Sequence:
        """Waits for the commit; the transfer's blocks become the sequence's."""
        with self._receiver.attach(request.ticket) as attached:
            names = self._block_names(request)
            attached.transfer.is_confirmed = attached.transfer.hashes == names
            commit = await attached.committed
            sequence = self._make_sequence(request, list(request.output_token_ids))
            with attached.doubted():
                self._check_commit(request, attached.transfer, commit, names)
            sequence.num_refetched_blocks = len(attached.transfer.asked_again)
            if sequence.append(commit.first_token.token_id) is not None:
                raise BadRequest("the first token ended the request; there is nothing to decode", param="ticket")
            with self._engine.lock:
                table = self._receiver.hand_over(attached.transfer)
                self._engine.submit_received(sequence, table, listener)
        return sequence

    async def _leave(self, sequence: Sequence | None) -> None:
        if sequence is not None:
            ended = self._engine.end(sequence)
            self._active.pop(sequence.transfer_id, None)
            await asyncio.wrap_future(ended)
        self._num_calls -= 1
        if self._num_calls == 0:
            self._idle.set()

    def _make_sequence(self, request: decode_pb2.GenerateRequest, output_token_ids: list[int]) -> Sequence:
        return Sequence(
            request_id=RequestId(request.request_id),
            transfer_id=transfer_id_of(request.transfer_id),
            prompt_token_ids=tuple(request.token_ids),
            sampling=sampling_from_pb(request.sampling),
            root_hash=root_hash(request.fingerprint, request.tenant_salt),
            arrived_s=time.monotonic(),
            max_model_len=self._limits.max_model_len,
            output_token_ids=output_token_ids,
        )

    def _block_names(self, request: decode_pb2.GenerateRequest) -> list[BlockHash]:
        root = root_hash(request.fingerprint, request.tenant_salt)
        tokens = (*request.token_ids, *request.output_token_ids)
        return block_hashes(root, tokens, self._limits.layout.block_size)

    def _check_commit(
        self,
        request: decode_pb2.GenerateRequest,
        transfer: Transfer,
        commit: decode_pb2.Commit,
        names: list[BlockHash],
    ) -> None:
        """The transfer must be of this very request; held blocks were found by names that the caller computed. The
        first token is the sender's word, and the model reads it next."""
        if transfer.transfer_id != request.transfer_id:
            raise BadRequest(
                f"the ticket is of transfer {transfer.transfer_id.hex()}, the request of {request.transfer_id.hex()}",
                param="ticket",
            )
        if commit.first_token.token_id >= self._limits.vocab_size:
            raise CorruptFrame(
                f"the commit's first token is {commit.first_token.token_id}, outside the vocabulary of "
                f"{self._limits.vocab_size}"
            )
        num_tokens = len(request.token_ids) + len(request.output_token_ids)
        if transfer.num_prompt_tokens != num_tokens:
            raise BadRequest(
                f"the transfer brought {transfer.num_prompt_tokens} tokens, the request has {num_tokens}",
                param="token_ids",
            )
        if names[: transfer.num_held_blocks] != transfer.held_hashes:
            raise BadRequest("the reservation's block hashes are not those of the request's tokens", param="token_ids")

    def _refuse_when_draining(self) -> None:
        if self._is_draining:
            raise Draining("this decode worker is draining; use another")

    def _check_identity(self, fingerprint: bytes) -> None:
        if fingerprint != self._limits.fingerprint:
            raise FingerprintMismatch(
                f"the request is for model {fingerprint.hex()}, this worker serves {self._limits.fingerprint.hex()}"
            )

    def _check_prompt_length(self, num_tokens: int) -> None:
        if not 0 < num_tokens < self._limits.max_model_len:
            raise BadRequest(
                f"the prompt has {num_tokens} tokens; allowed: 1 to {self._limits.max_model_len - 1}", param="prompt"
            )

    def _check_tokens(self, request: decode_pb2.GenerateRequest) -> None:
        self._check_prompt_length(len(request.token_ids) + len(request.output_token_ids))
        largest = max([*request.token_ids, *request.output_token_ids, *request.sampling.logit_bias])
        if largest >= self._limits.vocab_size:
            raise BadRequest(
                f"token id {largest} is outside the vocabulary of {self._limits.vocab_size}", param="prompt"
            )
        if request.transfer_id in self._active:
            raise BadRequest(f"transfer {request.transfer_id.hex()} is running already", param="transfer_id")
