"""One worker as the gateway sees it: its calls, its last status, and the work that this gateway has open there.

Owns the channel. Translates every gRPC error into `common.errors`. Does not decide when to connect or whom to choose.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from common.errors import PeerLost, TwostrokeError
from common.ids import BlockHash, Incarnation
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from common.prefix_index.base import Holder
from common.rpc.status import ERROR_KEY, metadata_dict, rpc_error_to_exception
from common.rpc.tokenizer_chunks import collect_tokenizer
from gateway.placement import Role, WorkerView

GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]
RunCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]

REASON_TIMEOUT_S = 1.0

_TRANSPORT_TROUBLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"  # another model, layout or role
    LOST = "lost"


def translate(error: grpc.aio.AioRpcError, peer: str) -> TwostrokeError:
    """A status without our own trailing metadata was made by the transport: the peer is lost."""
    if not was_reported(error) and error.code() in _TRANSPORT_TROUBLE:
        return PeerLost(f"{peer} is lost ({error.code().name}: {error.details()})")
    return rpc_error_to_exception(error, peer)


def was_reported(error: grpc.aio.AioRpcError) -> bool:
    """Whether a live peer raised it: then a PeerLost is about the peer's own peer."""
    return ERROR_KEY in metadata_dict(error.trailing_metadata())


@asynccontextmanager
async def calling(peer: str) -> AsyncIterator[None]:
    """What goes wrong with a call inside becomes an error of `common.errors`; our own cancellation passes through."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translate(error, peer) from None
    except grpc.aio.UsageError:
        raise PeerLost(f"{peer} has left: its channel is closed") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PeerLost(f"{peer} has left: its channel was closed during a call") from None


@dataclass(slots=True, eq=False)
class Claim:
    """Work that this gateway has given to a worker and that the worker's status may not show yet."""

    worker: "Worker"
    num_tokens: int = 0
    num_blocks: int = 0
    num_sequences: int = 0

    def end(self) -> None:
        """Idempotent."""
        self.worker.claims.discard(self)
        self.worker.on_load()


class Worker:
    """One configured address. Everything but the address changes when another process answers there."""

    def __init__(
        self, address: str, role: Role, channel: grpc.aio.Channel, on_load: Callable[[], None] = lambda: None
    ) -> None:
        """`on_load` hears when there may be less work here than before."""
        self.address = address
        self.role = role
        self.info = worker_pb2.WorkerInfo()
        self.state = WorkerState.CONNECTING
        self.reason = f"{self.name} was not reached yet"  # a sentence: who is not ready, and why
        self.status = worker_pb2.WorkerStatus()
        self.registration = 0
        self.claims: set[Claim] = set()
        self.on_load = on_load
        self._use(channel)

    def replace_channel(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Calls from now on go through `channel`. Returns the old one, for the caller to close."""
        old = self._channel
        self._use(channel)
        return old

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._decode = decode_pb2_grpc.DecodeStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillStub(channel)

    @property
    def name(self) -> str:
        """For messages: role, id where it is known, address."""
        return f"{self.role} worker {self.info.worker_id or '(unknown)'} at {self.address}"

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def holder(self) -> Holder:
        return Holder(self.info.worker_id, Incarnation(self.info.incarnation))

    def view(self) -> WorkerView:
        """The status, or what this gateway has open here where that is more: a status is always a little late."""
        status, total = self.status, self.info.total_blocks
        in_use = max(total - status.free_blocks, sum(claim.num_blocks for claim in self.claims))
        return WorkerView(
            worker_id=self.info.worker_id,
            address=self.address,
            role=self.role,
            registration=self.registration,
            is_ready=self.is_ready,
            is_draining=status.is_draining,
            total_blocks=total,
            free_blocks=max(0, total - in_use),
            queued_tokens=max(status.queued_tokens, sum(claim.num_tokens for claim in self.claims)),
            num_sequences=max(
                status.num_running + status.num_waiting, sum(claim.num_sequences for claim in self.claims)
            ),
        )

    def claim(self, *, num_tokens: int = 0, num_blocks: int = 0, num_sequences: int = 0) -> Claim:
        claim = Claim(self, num_tokens, num_blocks, num_sequences)
        self.claims.add(claim)
        return claim

    def update(self, status: worker_pb2.WorkerStatus) -> None:
        has_less = status.queued_tokens < self.status.queued_tokens
        self.status = status
        if has_less:
            self.on_load()

    async def describe(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        """Waits for the connection for up to `timeout_s`."""
        request = worker_pb2.DescribeRequest()
        async with calling(self.name):
            try:
                return await self._worker.Describe(request, timeout=timeout_s, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
            # A call that does not wait is told what is wrong with the connection, such as a certificate.
            return await self._worker.Describe(request, timeout=REASON_TIMEOUT_S)

    async def fetch_tokenizer(self, timeout_s: float) -> dict[str, bytes]:
        async with calling(self.name):
            return await collect_tokenizer(
                self._worker.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=timeout_s)
            )

    async def watch_status(self, interval_ms: int) -> AsyncGenerator[worker_pb2.WorkerStatus, None]:
        """Statuses until the worker ends the stream or is lost (PeerLost)."""
        call = self._worker.WatchStatus(worker_pb2.WatchStatusRequest(interval_ms=interval_ms))
        try:
            async with calling(self.name):
                async for status in call:
                    yield status
        finally:
            call.cancel()

    async def reserve(self, request: decode_pb2.ReserveRequest, timeout_s: float) -> decode_pb2.Ticket:
        async with calling(self.name):
            return await self._decode.Reserve(request, timeout=timeout_s)

    def open_generate(self, request: decode_pb2.GenerateRequest) -> GenerateCall:
        return self._decode.Generate(request)

    def open_run(self, request: prefill_pb2.PrefillRequest) -> RunCall:
        return self._prefill.Run(request)

    async def release(self, transfer_id: bytes, generation: int, timeout_s: float) -> int:
        """How many blocks the worker freed."""
        request = worker_pb2.ReleaseRequest(transfer_id=transfer_id, generation=generation)
        async with calling(self.name):
            return (await self._worker.Release(request, timeout=timeout_s)).freed_blocks

    async def drain(self, timeout_s: float) -> float:
        """Takes the worker out of service; returns within how many seconds it will be gone."""
        async with calling(self.name):
            return (await self._worker.Drain(worker_pb2.DrainRequest(), timeout=timeout_s)).grace_s

    async def count_held(self, hashes: Sequence[BlockHash], timeout_s: float) -> int:
        """Leading blocks of `hashes` that the worker holds now."""
        async with calling(self.name):
            reply = await self._worker.CountHeld(worker_pb2.CountHeldRequest(block_hashes=hashes), timeout=timeout_s)
        return reply.num_held_blocks

    async def close(self, grace_s: float | None = None) -> None:
        """Calls in flight may end for `grace_s`."""
        await self._channel.close(grace_s)
