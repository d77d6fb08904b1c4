"""Who is there: one task per address keeps a worker described, checked and watched, and reconnects for ever.

A worker that is lost is not ready from that moment on; one that serves another model is refused, and asked again later.
"""

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from common.errors import FingerprintMismatch, PeerLost, TwostrokeError
from common.logs import fields
from common.rpc.channel import Connector
from gateway.deployment import Deployment, check_role, make_deployment
from gateway.placement import Role, WorkerView
from gateway.worker import Worker, WorkerState

log = logging.getLogger("twostroke.registry")

TOKENIZER_TIMEOUT_S = 60.0
CLOSE_GRACE_S = 60.0
"""A worker that left the configuration may finish what it has for this long."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between two tries: doubling, bounded, up to a half less at random so that gateways spread out."""

    first_s: float = 0.1
    longest_s: float = 5.0

    def delay_s(self, num_failures: int) -> float:
        delay_s = min(self.longest_s, self.first_s * 2 ** min(num_failures - 1, 16))
        return delay_s * random.uniform(0.5, 1.0)  # noqa: S311 (spreads load, guards nothing)


class Registry:
    def __init__(
        self,
        *,
        model_name: str | None = None,
        connector: Connector | None = None,
        backoff: Backoff = Backoff(),
        status_interval_ms: int = 50,
        describe_timeout_s: float = 10.0,
    ) -> None:
        self._model_name = model_name
        self._connector = connector or Connector()
        self._backoff = backoff
        self._status_interval_ms = status_interval_ms
        self._describe_timeout_s = describe_timeout_s
        self._workers: dict[tuple[Role, str], Worker] = {}
        self._links: dict[tuple[Role, str], asyncio.Task[None]] = {}
        self._channel_versions: dict[tuple[Role, str], int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._defining = asyncio.Lock()
        self._defined = asyncio.Event()
        self._change = asyncio.Event()
        self._load_change = asyncio.Event()
        self._deployment: Deployment | None = None

    @property
    def deployment(self) -> Deployment | None:
        """None until the first decode worker has answered."""
        return self._deployment

    async def defined(self) -> Deployment:
        """Waits for the first decode worker."""
        await self._defined.wait()
        assert self._deployment is not None
        return self._deployment

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def views(self) -> list[WorkerView]:
        return [worker.view() for worker in self._workers.values()]

    def worker(self, view: WorkerView) -> Worker:
        return self._workers[view.role, view.address]

    def not_ready(self) -> list[str]:
        """One line for each worker that is not ready: who, and why."""
        return [worker.reason for worker in self._workers.values() if not worker.is_ready]

    def set_addresses(self, role: Role, addresses: Iterable[str]) -> None:
        """Makes `addresses` all that there are of `role`; links start and end accordingly."""
        wanted = {(role, address) for address in addresses}
        for key in [key for key in self._workers if key[0] is role and key not in wanted]:
            self._remove(key)
        for key in sorted(wanted - self._workers.keys()):
            version = self._connector.version
            worker = Worker(key[1], role, self._connector.open(key[1]), self.note_load_change)
            self._workers[key], self._channel_versions[key] = worker, version
            self._links[key] = asyncio.create_task(self._keep(worker), name=f"link {worker.address}")
            self._links[key].add_done_callback(_log_defect)

    async def next_change(self) -> None:
        """Returns when some worker has become ready, or is not ready for another reason than before."""
        await self._change.wait()

    async def next_load_change(self) -> None:
        """Returns when some worker may have less work than before, or is ready or not ready any more."""
        await self._load_change.wait()

    def note_load_change(self) -> None:
        self._load_change.set()
        self._load_change = asyncio.Event()

    async def close(self) -> None:
        """Ends every link and every channel."""
        links = list(self._links.values())
        for task in (*links, *self._closing):
            task.cancel()
        await asyncio.gather(*links, *self._closing, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    def _remove(self, key: tuple[Role, str]) -> None:
        worker = self._workers.pop(key)
        self._channel_versions.pop(key)
        self._links.pop(key).cancel()
        self._leave(worker, WorkerState.LOST, f"{worker.name} was removed from the configuration")
        self._close_in_time(worker.close(CLOSE_GRACE_S))

    def _renew_channel(self, worker: Worker) -> None:
        """After a change of our certificate: a channel shows the one that it was opened with."""
        key, version = (worker.role, worker.address), self._connector.version
        if self._channel_versions[key] != version:
            self._channel_versions[key] = version
            old = worker.replace_channel(self._connector.open(worker.address))
            self._close_in_time(old.close(CLOSE_GRACE_S))

    def _close_in_time(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _keep(self, worker: Worker) -> None:
        num_failures = 0
        while True:
            registration = worker.registration
            self._renew_channel(worker)
            try:
                await self._register(worker)
                await self._watch(worker)
            except FingerprintMismatch as error:
                self._leave(worker, WorkerState.REFUSED, error.message)
            except TwostrokeError as error:
                self._leave(worker, WorkerState.LOST, error.message)
            num_failures = 1 if worker.registration != registration else num_failures + 1
            await asyncio.sleep(self._backoff.delay_s(num_failures))

    async def _register(self, worker: Worker) -> None:
        info = await worker.describe(self._describe_timeout_s)
        if worker.info.incarnation and worker.info.incarnation != info.incarnation:
            log.info("%s was restarted", worker.name, extra=fields(incarnation=info.incarnation.hex()))
        check_role(worker.name, worker.role, info)
        worker.info = info
        if worker.role is Role.DECODE:
            await self._define(worker)
        if self._deployment is None:
            worker.reason = f"{worker.name} waits for the first decode worker"
        deployment = await self.defined()
        deployment.check(worker.name, worker.role, info)
        self._deployment = deployment.joined_by(worker.name, info)

    async def _define(self, worker: Worker) -> None:
        """The first decode worker defines the deployment; the others wait for it."""
        async with self._defining:
            if self._deployment is None:
                files = await worker.fetch_tokenizer(TOKENIZER_TIMEOUT_S)
                self._deployment = make_deployment(worker.name, worker.info, files, self._model_name)
                self._defined.set()

    def _check_single(self, worker: Worker) -> None:
        """Two addresses with one id: the index could not tell them apart. A new address may replace a lost one."""
        for other in self._workers.values():
            if other is not worker and other.is_ready and other.info.worker_id == worker.info.worker_id:
                raise FingerprintMismatch(f"{worker.name} has the id of the worker at {other.address}; ids must differ")

    async def _watch(self, worker: Worker) -> None:
        """Ready from the first status until the stream ends, which it never does while all is well."""
        async with aclosing(worker.watch_status(self._status_interval_ms)) as statuses:
            async for status in statuses:
                if status.incarnation != worker.info.incarnation:
                    raise PeerLost(f"{worker.name} was restarted")
                worker.update(status)
                if not worker.is_ready:
                    self._enter(worker)
        raise PeerLost(f"{worker.name} ended its status stream")

    def _enter(self, worker: Worker) -> None:
        self._check_single(worker)
        worker.state, worker.reason = WorkerState.READY, ""
        worker.registration += 1
        log.info("%s is ready", worker.name, extra=fields(backend=worker.info.backend))
        self._announce()

    def _leave(self, worker: Worker, state: WorkerState, reason: str) -> None:
        """A state that stays the same is logged once."""
        is_news = (worker.state, worker.reason) != (state, reason)
        worker.state, worker.reason = state, reason
        if is_news:
            log.warning("%s: %s", state, reason)
            self._announce()

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        self.note_load_change()


def _log_defect(link: asyncio.Task[None]) -> None:
    """A link ends by cancellation alone; anything else is a defect of ours, and must be seen."""
    if not link.cancelled() and (error := link.exception()) is not None:
        log.critical("%s has failed and will not be tried again", link.get_name(), exc_info=error)
