"""What every fake worker has: a real gRPC server, its description and status, and named points for failures.

Tokens are a function of (prompt, seed, position), the same in every fake, as real workers promise.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from opentelemetry import trace

from common.errors import Draining, TwostrokeError, UnknownTransfer
from common.kv.layout import KVFormat, KVLayout
from common.pb import (
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from common.rpc.convert import layout_to_pb
from common.rpc.handlers import HandlerInterceptor
from common.rpc.limits import SERVER_OPTIONS
from common.rpc.tls import TlsIdentity
from common.rpc.tokenizer_chunks import tokenizer_chunks
from common.sampling import FinishReason
from common.tokenizer_files import tokenizer_digest

VOCAB_SIZE = 997
LAYOUT = KVLayout(KVFormat.INT8, block_size=16, num_layers=2, num_kv_heads=1, head_dim=8)
FINGERPRINT = bytes(range(32))
TOKENIZER_FILES = {"tokenizer.json": b"{}", "meta.json": b'{"name": "fake"}'}
TOTAL_BLOCKS = 1024
GRACE_S = 30.0

Action = Callable[[], Awaitable[None]]


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    """The token at output position `position`."""
    return (sum(prompt) * 31 + seed * 17 + position * 101 + len(prompt)) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    tokens: list[int] = []
    for position in range(max_tokens):
        tokens.append(token_at(prompt, seed, position))
        if tokens[-1] in stop:
            break
    return tokens


def finish_of(sampling: types_pb2.SamplingParams, token: int, num_tokens: int) -> FinishReason | None:
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= sampling.max_tokens else None


async def hang() -> None:
    """For ever, or until the call is cancelled."""
    await asyncio.get_running_loop().create_future()


def fail_with(error: TwostrokeError) -> Action:
    async def fail() -> None:
        raise error

    return fail


@dataclass
class Points:
    """Named points in a worker's life. An action at a point runs whenever it is passed; `reached` can be awaited."""

    actions: dict[str, Action] = field(default_factory=dict)
    num_reached: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    trace_parents: dict[str, int] = field(default_factory=dict)  # span id of the caller, at the last passing
    _events: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def reach(self, point: str) -> None:
        self.num_reached[point] += 1
        self.trace_parents[point] = trace.get_current_span().get_span_context().span_id
        self._events[point].set()
        if point in self.actions:
            await self.actions[point]()

    async def reached(self, point: str) -> None:
        await self._events[point].wait()


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """What both roles share. Points: describe, watch, count_held, release, drain."""

    role: worker_pb2.Role

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.fingerprint = FINGERPRINT
        self.layout = LAYOUT
        self.narrower_fingerprints: dict[str, bytes] = {}
        self.numerics = "fake"
        self.announced_role = self.role
        self.tokenizer_files = TOKENIZER_FILES
        self.announced_digest = tokenizer_digest(TOKENIZER_FILES)
        self.incarnation = secrets.token_bytes(16)
        self.status = worker_pb2.WorkerStatus(free_blocks=TOTAL_BLOCKS)
        self.points = Points()
        self.address = ""
        self.tls: TlsIdentity | None = None
        self.num_held = 0  # leading blocks of any text that it says it holds
        self.released: dict[bytes, int] = {}
        self._status_changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Again after a death: another incarnation at the same address."""
        self.incarnation = secrets.token_bytes(16)
        server = grpc.aio.server(interceptors=(HandlerInterceptor(),), options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        self._add_services(server)
        if self.tls is None:
            port = server.add_insecure_port(self.address or address)
        else:
            port = server.add_secure_port(self.address or address, self.tls.server_credentials())
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        if self._background:
            await asyncio.wait(self._background)

    async def die(self) -> None:
        """As an action: the process is gone, with all that it held; the call that got here never goes on."""
        self._forget()
        task = asyncio.create_task(self.stop_server())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await hang()

    async def stop_server(self) -> None:
        assert self._server is not None
        server, self._server = self._server, None
        await server.stop(None)

    def set_status(self, **values: int | bool) -> None:
        for name, value in values.items():
            setattr(self.status, name, value)
        changed, self._status_changed = self._status_changed, asyncio.Event()
        changed.set()

    @property
    def num_open(self) -> int:
        """Reservations, jobs and sequences."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError

    async def Describe(self, request: worker_pb2.DescribeRequest, context: object) -> worker_pb2.WorkerInfo:
        await self.points.reach("describe")
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            role=self.announced_role,
            incarnation=self.incarnation,
            identity=types_pb2.ModelIdentity(
                model_name="fake-model",
                fingerprint=self.fingerprint,
                layout=layout_to_pb(self.layout),
                numerics=self.numerics,
                narrower_fingerprints=self.narrower_fingerprints,
                exact=True,
                max_model_len=4096,
                vocab_size=VOCAB_SIZE,
            ),
            total_blocks=TOTAL_BLOCKS,
            tokenizer_digest=self.announced_digest,
            backend="fake",
        )

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: object
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        while True:
            changed = self._status_changed
            status = worker_pb2.WorkerStatus()
            status.CopyFrom(self.status)
            status.incarnation = self.incarnation
            yield status
            await self.points.reach("watch")
            await changed.wait()

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: object
    ) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        await self.points.reach("tokenizer")
        for chunk in tokenizer_chunks(self.tokenizer_files):
            yield chunk

    async def Release(self, request: worker_pb2.ReleaseRequest, context: object) -> worker_pb2.ReleaseReply:
        await self.points.reach("release")
        return worker_pb2.ReleaseReply(freed_blocks=await self.release(request.transfer_id, request.generation))

    async def Drain(self, request: worker_pb2.DrainRequest, context: object) -> worker_pb2.DrainReply:
        await self.points.reach("drain")
        self.set_status(is_draining=True)
        return worker_pb2.DrainReply(grace_s=GRACE_S)

    async def CountHeld(self, request: worker_pb2.CountHeldRequest, context: object) -> worker_pb2.CountHeldReply:
        await self.points.reach("count_held")
        return worker_pb2.CountHeldReply(num_held_blocks=min(self.num_held, len(request.block_hashes)))

    async def release(self, transfer_id: bytes, generation: int) -> int:
        self.released[transfer_id] = max(self.released.get(transfer_id, 0), generation)
        return self._release(transfer_id, generation)

    def _refuse_new(self) -> None:
        """Drained: what it has goes on, and nothing is begun."""
        if self.status.is_draining:
            raise Draining(f"{self.worker_id} is leaving")

    def _refuse_released(self, transfer_id: bytes, generation: int) -> None:
        """A release may overtake the call that it is about."""
        if generation <= self.released.get(transfer_id, 0):
            raise UnknownTransfer("released before it began")

    def _add_services(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _release(self, transfer_id: bytes, generation: int) -> int:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError
