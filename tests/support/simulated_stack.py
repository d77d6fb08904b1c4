"""Gateway, prefill and decode services in one event loop with virtual time: no network, no threads, no model.

The services are the real ones, from the dispatcher to the block pools; engines step when they are told to, time passes
when it is told to, and workers die and come back.
"""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from common.errors import TwostrokeError
from common.faults.injector import STALL_S, Fault
from common.faults.points import FaultKind, Point
from common.ids import RequestId, mint_incarnation
from common.kv.quantizing import narrower_sources
from common.model.batch import ScheduledTokens
from common.model.runner import RunResult
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc
from common.rpc.convert import layout_to_pb
from common.rpc.worker_servicer import WorkerServicer
from common.sampling import SamplingParams
from common.telemetry.setup import make_telemetry
from common.tokenizer_files import tokenizer_digest
from common.worker import WorkerParts
from decode_svc.config import DecodeSettings
from decode_svc.service import DecodeService
from gateway.admission import Admission
from gateway.dispatch import DispatchPolicy, HandOffDispatcher
from gateway.generation import Generation, Route
from gateway.metrics import DispatchMetrics
from gateway.placement import Role
from gateway.prefix_lookup import PrefixLookup
from gateway.registry import Backoff, Registry
from prefill_svc.config import PrefillSettings
from prefill_svc.service import PrefillService
from tests.support.fake_runner import FakeRunner, expected_tokens, fake_layout
from tests.support.fake_worker import TOKENIZER_FILES
from tests.support.simulated_network import Channel, Host, Network
from tests.support.virtual_loop import VirtualLoop

BLOCK_SIZE = 4
VOCAB = 50
FINGERPRINT = b"f" * 32
MAX_MODEL_LEN = 64
LEASE_S = 8.0
PROGRESS_TIMEOUT_S = 6.0
STATUS_INTERVAL_MS = 500
PB_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}


class ScriptedFaults:
    """An injector whose faults are given one by one: the next message at a point suffers the next fault there."""

    def __init__(self, draw: random.Random) -> None:
        self.next_at: dict[Point, deque[FaultKind]] = defaultdict(deque)
        self._draw = draw

    async def pass_point(self, point: Point) -> Fault | None:
        if not self.next_at[point]:
            return None
        kind = self.next_at[point].popleft()
        if kind is FaultKind.STALL:
            await asyncio.sleep(STALL_S)
        if kind is FaultKind.DELAY:
            await asyncio.sleep(0.2)
            return None
        return Fault(kind, 0.0, self._draw.getrandbits(63))


class InterruptibleRunner(FakeRunner):
    """`during` runs once, in the middle of a step: what comes from outside while the model computes."""

    during: Callable[[], None] | None = None

    def run(self, scheduled: Sequence[ScheduledTokens]) -> RunResult:
        during, self.during = self.during, None
        if during is not None:
            during()
        return super().run(scheduled)


@dataclass
class SimulatedWorker:
    name: str
    role: Role
    host: Host
    runner: InterruptibleRunner
    service: Any
    tasks: list["asyncio.Task[Any]"]

    def check_baseline(self) -> None:
        """It holds nothing."""
        self.service._engine.check_integrity()
        load = self.service._engine.load()
        assert load.free_blocks == self.runner.cache.num_blocks, f"{self.name} has leaked: {load}"
        assert (load.reserved_blocks, load.num_running, load.num_waiting) == (0, 0, 0), f"{self.name}: {load}"
        assert not self.host.calls, f"{self.name} has {len(self.host.calls)} calls open"


@dataclass
class Client:
    generation: Generation
    expected: list[int]
    received: list[int] = field(default_factory=list)
    route: Route = field(default_factory=Route)
    error: TwostrokeError | None = None
    has_left: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def has_ended(self) -> bool:
        assert self.task is not None
        return self.task.done()

    def check(self) -> None:
        """What came is right: all of it, or its beginning where the client left or was told of a failure."""
        is_cut = self.has_left or self.error is not None or not self.has_ended
        wanted = self.expected[: len(self.received)] if is_cut else self.expected
        assert self.received == wanted, f"wrong answer: {self.received} instead of {self.expected}"


class SimulatedStack:
    def __init__(self, *, num_blocks: dict[Role, int], num_workers: int = 2) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.faults = ScriptedFaults(random.Random(1))
        self.network = Network(self.faults)  # type: ignore[arg-type]
        self.clients: list[Client] = []
        self.workers: dict[str, SimulatedWorker] = {}
        self.loop_errors: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(str(context)))
        self._num_blocks = num_blocks
        self.names = [f"{role}-{number}" for role in Role for number in range(num_workers)]
        for name in self.names:
            self.start_worker(name)
        self._start_gateway()
        self.loop.advance(1.0)
        assert all(worker.is_ready for worker in self.registry.workers()), self.registry.not_ready()

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Client:
        generation = Generation(
            RequestId(f"r{len(self.clients)}"),
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            "tenant",
        )
        client = Client(generation, expected_tokens(prompt, max_tokens, VOCAB))
        client.task = self.loop.create_task(self._read(client))
        self.clients.append(client)
        self.loop.settle()
        return client

    def leave(self, client: Client) -> None:
        assert client.task is not None
        if not client.task.done():
            client.has_left = True
            client.task.cancel()
        self.loop.settle()

    def step(self, name: str, during: Callable[[], None] | None = None) -> bool:
        """One step of a worker's engine; `during` happens while its model computes."""
        worker = self.workers.get(name)
        if worker is None:
            return False
        worker.runner.during = during
        has_worked: bool = worker.service.step()
        self.loop.settle()
        return has_worked

    def step_everyone(self) -> int:
        """How many of them had something to compute."""
        return sum(self.step(name) for name in list(self.workers))

    def die(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.network.die(worker.host)
            for task in worker.tasks:
                task.cancel()
        self.loop.settle()

    def start_worker(self, name: str) -> None:
        """Nothing when it is there."""
        if name not in self.workers:
            self.workers[name] = self._make_worker(name, Role(name.split("-")[0]))
            self.loop.settle()

    def work(self, max_steps: int = 500) -> None:
        """Steps everyone until nobody has anything to compute."""
        for _ in range(max_steps):
            if self.step_everyone() == 0:
                return
        raise AssertionError(f"still computing after {max_steps} steps")

    def rest(self, limit_s: float) -> None:
        """Everything that is open comes to its end, within `limit_s` of virtual time; then nobody holds anything."""
        for name in self.names:
            self.start_worker(name)
        self.faults.next_at.clear()
        until_s = self.loop.time() + limit_s
        while self.loop.time() < until_s:
            self.work()
            self.loop.advance(0.5)
        self.work()

    def check(self) -> None:
        """At any moment."""
        for client in self.clients:
            client.check()
        for worker in self.workers.values():
            worker.service._engine.check_integrity()
            assert not worker.host.defects, worker.host.defects
        assert not self.loop_errors, self.loop_errors

    def check_baseline(self) -> None:
        """After `rest`."""
        self.check()
        hanging = [client.generation.request_id for client in self.clients if not client.has_ended]
        assert not hanging, f"{hanging} never ended"
        for client in self.clients:
            self._raise_defect(client)
        for worker in self.workers.values():
            # The gateway watches every worker's status, and that is all.
            worker.host.calls -= {call for call in worker.host.calls if call.is_watch}
            worker.check_baseline()
        assert self.admission.num_active == 0
        assert not any(worker.claims for worker in self.registry.workers())

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        asyncio.set_event_loop(None)

    def _raise_defect(self, client: Client) -> None:
        assert client.task is not None
        if not client.task.cancelled() and (error := client.task.exception()) is not None:
            raise error

    async def _read(self, client: Client) -> None:
        try:
            async for delta in self.dispatcher.generate(client.generation, client.route):
                client.received.extend(token.token_id for token in delta.tokens)
        except TwostrokeError as error:
            client.error = error

    def _start_gateway(self) -> None:
        host = Host("gateway")
        self.registry = Registry(
            connector=_Connector(self.network, host),  # type: ignore[arg-type]
            backoff=Backoff(0.1, 1.0),
            status_interval_ms=STATUS_INTERVAL_MS,
        )
        self.admission = Admission(100)
        metrics = DispatchMetrics(CollectorRegistry())
        policy = DispatchPolicy(
            has_prefill=True, max_retries=2, progress_timeout_s=PROGRESS_TIMEOUT_S, reconnect_wait_s=20.0
        )
        lookup = PrefixLookup(None, 1.0, self.loop.time, metrics.index_available)
        self.dispatcher = HandOffDispatcher(
            self.registry, lookup, self.admission, policy, b"a secret of ours.", metrics, NoOpTracer(), self.loop.time
        )
        self.loop.call_soon(self._introduce)
        self.loop.settle()

    def _introduce(self) -> None:
        for role in Role:
            self.registry.set_addresses(role, [name for name in self.names if name.startswith(role)])

    def _make_worker(self, name: str, role: Role) -> SimulatedWorker:
        host = Host(name)
        runner = InterruptibleRunner(self._num_blocks[role], BLOCK_SIZE, VOCAB)
        connector: Any = _Connector(self.network, host)
        parts = WorkerParts(_model(runner), make_telemetry("simulated", name, ()), connector, wake_engine=lambda: None)
        service: Any
        if role is Role.DECODE:
            settings = DecodeSettings.model_construct(max_num_batched_tokens=16, max_waiting=8, lease_s=LEASE_S)
            service = DecodeService(settings, parts)
            service._receiver._clock = self.loop.time
        else:
            service = PrefillService(PrefillSettings.model_construct(max_num_batched_tokens=8, max_waiting=8), parts)
        service.add_to_server(host)
        worker_pb2_grpc.add_WorkerServicer_to_server(_worker_servicer(name, role, runner, service), host)
        self.network.hosts[name] = host
        tasks = [self.loop.create_task(service.run_background())]
        return SimulatedWorker(name, role, host, runner, service, tasks)


class _Connector:
    """Stands for `common.rpc.channel.Connector`."""

    version = 0

    def __init__(self, network: Network, owner: Host) -> None:
        self._network = network
        self._owner = owner

    def open(self, address: str) -> Channel:
        return self._network.channel(address, self._owner)


def _model(runner: FakeRunner) -> Any:
    """What a service reads of a LoadedModel."""
    return SimpleNamespace(
        runner=runner,
        num_blocks=runner.cache.num_blocks,
        layout=runner.cache.layout,
        fingerprint=FINGERPRINT,
        narrower_fingerprints={name: name.encode().ljust(32) for name in narrower_sources(runner.cache)},
        config=SimpleNamespace(vocab_size=VOCAB),
        max_model_len=MAX_MODEL_LEN,
    )


def _worker_servicer(name: str, role: Role, runner: FakeRunner, service: Any) -> WorkerServicer:
    incarnation = mint_incarnation()
    info = worker_pb2.WorkerInfo(
        worker_id=name,
        role=PB_ROLES[role],
        incarnation=incarnation,
        identity=types_pb2.ModelIdentity(
            model_name="simulated",
            fingerprint=FINGERPRINT,
            layout=layout_to_pb(fake_layout(BLOCK_SIZE)),
            numerics="fake",
            exact=True,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
        ),
        total_blocks=runner.cache.num_blocks,
        tokenizer_digest=tokenizer_digest(TOKENIZER_FILES),
    )

    def status() -> worker_pb2.WorkerStatus:
        current: worker_pb2.WorkerStatus = service.status()
        current.incarnation = incarnation
        return current

    return WorkerServicer(info, TOKENIZER_FILES, status, service.release, lambda: 0.0, service.count_held)
