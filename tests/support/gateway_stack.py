"""The gateway's back half over fake workers, ready to generate; its end checks that nothing is held anywhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from common.ids import RequestId
from common.prefix_index.base import PrefixIndex
from common.rpc.channel import Connector
from common.sampling import SamplingParams
from gateway.admission import Admission
from gateway.dispatch import DispatchPolicy, HandOffDispatcher
from gateway.generation import Generation, Route, TokenDelta
from gateway.metrics import DispatchMetrics
from gateway.placement import Role
from gateway.prefix_lookup import PrefixLookup
from gateway.registry import Backoff, Registry
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.fake_workers import FakeDecode, FakePrefill

PROMPT = tuple(range(100, 140))
PATIENCE_S = 20.0
"""How long a test waits for what must come at once; only a failing test gets there."""


@dataclass
class Outcome:
    """What a client saw of one generation."""

    route: Route
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for delta in self.deltas for token in delta.tokens]

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


def make_generation(
    prompt: Sequence[int] = PROMPT, *, seed: int = 7, max_tokens: int = 6, stop: frozenset[int] = frozenset()
) -> Generation:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, stop_token_ids=stop)
    return Generation(RequestId("cmpl-test"), tuple(prompt), sampling, "tenant")


def wanted(generation: Generation) -> list[int]:
    sampling = generation.sampling
    return expected_tokens(generation.token_ids, sampling.seed, sampling.max_tokens, sampling.stop_token_ids)


class GatewayStack:
    def __init__(
        self,
        prefill: Sequence[FakePrefill],
        decode: Sequence[FakeDecode],
        *,
        index: PrefixIndex | None = None,
        max_active: int = 1000,
        tracer: Tracer | None = None,
        connector: Connector | None = None,
        describe_timeout_s: float = PATIENCE_S,
        **policy: bool | int | float,
    ) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.prometheus = CollectorRegistry()
        self.metrics = DispatchMetrics(self.prometheus)
        self.registry = Registry(
            connector=connector,
            backoff=Backoff(0.001, 0.05),
            status_interval_ms=1,
            describe_timeout_s=describe_timeout_s,
        )
        self.admission = Admission(max_active)
        self.dispatcher = HandOffDispatcher(
            self.registry,
            PrefixLookup(index, 1.0, time.monotonic, self.metrics.index_available),
            self.admission,
            DispatchPolicy(has_prefill=bool(self.prefill), **policy),  # type: ignore[arg-type]
            b"a server secret.",
            self.metrics,
            tracer or NoOpTracer(),
            time.monotonic,
        )

    @property
    def fakes(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        await asyncio.gather(*(fake.start() for fake in self.fakes))
        self.registry.set_addresses(Role.DECODE, [fake.address for fake in self.decode])
        self.registry.set_addresses(Role.PREFILL, [fake.address for fake in self.prefill])

    async def until_ready(self, *fakes: FakeWorker) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not all(self._is_ready(fake) for fake in fakes or self.fakes):
                await self.registry.next_change()

    async def until_lost(self, fake: FakeWorker) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self._is_ready(fake):
                await self.registry.next_change()

    async def until_draining(self, fake: FakeWorker) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(view.address == fake.address and view.is_draining for view in self.registry.views()):
                await asyncio.sleep(0)

    def _is_ready(self, fake: FakeWorker) -> bool:
        return any(
            worker.address == fake.address and worker.is_ready and worker.info.incarnation == fake.incarnation
            for worker in self.registry.workers()
        )

    async def run(self, generation: Generation) -> Outcome:
        """Reads a generation to its end; what it raises is the test's."""
        outcome = Outcome(Route())
        async with asyncio.timeout(PATIENCE_S):
            async for delta in self.dispatcher.generate(generation, outcome.route):
                outcome.deltas.append(delta)
        return outcome

    def sample(self, name: str, **labels: str) -> float:
        return self.prometheus.get_sample_value(name, labels) or 0.0

    async def check_integrity(self) -> None:
        """Nothing is held by a worker, and nothing is open here."""
        async with asyncio.timeout(PATIENCE_S):
            await self.dispatcher.settled()
        for fake in self.fakes:
            fake.check_integrity()
        assert self.admission.num_active == 0
        for worker in self.registry.workers():
            assert not worker.claims, f"{worker.name} has claims left"

    async def stop(self) -> None:
        await self.registry.close()
        await asyncio.gather(*(fake.stop() for fake in self.fakes))


@asynccontextmanager
async def running(stack: GatewayStack) -> AsyncIterator[GatewayStack]:
    """Started and ready; checked and stopped at the end."""
    await stack.start()
    try:
        await stack.until_ready()
        yield stack
        await stack.check_integrity()
    finally:
        await stack.stop()
