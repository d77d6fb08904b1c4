"""What prefill and decode processes have in common: model, telemetry, index publisher, gRPC server, an orderly end."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from common.config import cache_dir, state_dir
from common.engine_config import EngineSettings
from common.engine_load import EngineLoad, EngineTotals
from common.engine_thread import EngineThread
from common.faults.injector import install
from common.ids import BlockHash, mint_incarnation
from common.kv.block_pool import IndexChanges
from common.logs import fields
from common.model.assembly import LoadedModel, load_model
from common.pb import types_pb2, worker_pb2, worker_pb2_grpc
from common.prefix_index.base import INDEX_NAMESPACE, Holder
from common.prefix_index.publisher import IndexPublisher
from common.prefix_index.redis import RedisPrefixIndex
from common.process_memory import peak_memory_bytes
from common.rpc.channel import Connector
from common.rpc.convert import layout_to_pb
from common.rpc.server import WorkerServer
from common.rpc.tls import TlsIdentity, load_identity
from common.rpc.worker_servicer import WorkerServicer
from common.telemetry.setup import Telemetry, setup_telemetry

log = logging.getLogger("twostroke.worker")


class WorkerService(Protocol):
    """What a role brings: an engine, its servicer, and what it tells of itself."""

    service_name: str

    def step(self) -> bool:
        """One engine step, in the engine's thread; False when there was nothing to do."""

    def add_to_server(self, server: Any) -> None: ...

    def status(self) -> worker_pb2.WorkerStatus:
        """All fields but the incarnation and the memory."""

    async def release(self, transfer_id: bytes, generation: int) -> int: ...

    async def drain(self) -> None: ...

    async def run_background(self) -> None:
        """Runs until cancelled."""

    def take_index_changes(self) -> IndexChanges: ...

    def count_held(self, hashes: list[BlockHash]) -> int:
        """Leading blocks of `hashes` that are held now."""

    def held_hashes(self) -> Collection[BlockHash]: ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a role's service is built from. `wake_engine` is callable from any thread."""

    model: LoadedModel
    telemetry: Telemetry
    connector: Connector  # to other workers
    wake_engine: Callable[[], None]


async def run_worker(
    settings: EngineSettings, role: "worker_pb2.Role", make_service: Callable[[WorkerParts], WorkerService]
) -> None:
    """Runs until SIGTERM or a call of Drain, and an orderly end. Raises ConfigError or ModelLoadError when it cannot
    start."""
    name = worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()
    install(settings.fault_plan())
    tls = load_identity(settings.tls_dir)
    # The port first: that it is in use should not be found out after the model was loaded.
    server = make_server(settings, f"twostroke.v1.{name.capitalize()}", tls)
    worker_id = settings.worker_id or f"{name}-{socket.gethostname()}-{secrets.token_hex(3)}"
    telemetry = setup_telemetry(f"twostroke-{name}", worker_id, state_dir())
    make_parts = partial(WorkerParts, _load(settings), telemetry, Connector(tls))
    worker = _Worker(settings, Holder(worker_id, mint_incarnation()), make_parts, make_service)
    worker.add_to_server(server, role)
    worker.engine_thread.start()
    await server.start()
    try:
        await worker.serve(server)
    finally:
        worker.engine_thread.stop()
        telemetry.shutdown()


class _Worker:
    """One incarnation: the role's service, the thread of its engine, the publisher of what its pool holds."""

    def __init__(
        self,
        settings: EngineSettings,
        holder: Holder,
        make_parts: Callable[[Callable[[], None]], WorkerParts],
        make_service: Callable[[WorkerParts], WorkerService],
    ) -> None:
        self.engine_thread = EngineThread(self._step, self._report_fatal, "engine")
        parts = make_parts(self.engine_thread.wake)
        self.model = parts.model
        self._settings = settings
        self._holder = holder
        self._service = make_service(parts)
        self._publisher = _make_publisher(settings, holder, self._service)
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()

    def add_to_server(self, server: WorkerServer, role: "worker_pb2.Role") -> None:
        self._service.add_to_server(server.grpc_server)
        servicer = WorkerServicer(
            _worker_info(self._holder, role, self.model),
            self.model.prepared.tokenizer_files,
            self._status,
            self._service.release,
            self._begin_drain(server),
            self._service.count_held,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc_server)

    async def serve(self, server: WorkerServer) -> None:
        """Until it is told to end, and the drain after that. Raises when the engine or a background task ends."""
        announcing = asyncio.create_task(self._announce(server.address))
        background = [asyncio.create_task(self._service.run_background())]
        if self._publisher is not None:
            background.append(asyncio.create_task(self._publisher.run()))
        try:
            await server.serve_until_stopped(
                self._service.drain, self._settings.drain_grace_s, (self._fatal, *background)
            )
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(announcing, *background, return_exceptions=True)
            if self._publisher is not None:
                await self._publisher.close()

    async def _announce(self, address: str) -> None:
        """A task, so that it speaks when the server handles signals already: who reads this may send one at once."""
        backend = self.model.ops.description
        log.info("ready", extra=fields(address=address, worker=self._holder.worker_id, backend=backend))

    def _begin_drain(self, server: WorkerServer) -> Callable[[], float]:
        def begin() -> float:
            log.info("asked to drain")
            server.request_drain()
            return self._settings.drain_grace_s

        return begin

    def _step(self) -> bool:
        has_worked = self._service.step()
        if has_worked and self._publisher is not None:
            self._publisher.notify()
        return has_worked

    def _status(self) -> worker_pb2.WorkerStatus:
        status = self._service.status()
        status.incarnation = self._holder.incarnation
        status.peak_memory_bytes = peak_memory_bytes()
        return status

    def _report_fatal(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._set_fatal, error)

    def _set_fatal(self, error: BaseException) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)


def make_server(settings: EngineSettings, service_name: str, tls: TlsIdentity | None) -> WorkerServer:
    """Raises ConfigError where the settings would have it serve other machines unencrypted, or the port is in use."""
    return WorkerServer(
        f"{settings.host}:{settings.port}",
        (service_name,),
        tls=tls,
        allow_unencrypted=settings.allow_unencrypted,
        health_address=None if settings.health_port is None else f"{settings.host}:{settings.health_port}",
    )


def engine_status(load: EngineLoad, totals: EngineTotals) -> worker_pb2.WorkerStatus:
    """What both roles tell alike; each adds its own fields."""
    return worker_pb2.WorkerStatus(
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        reserved_blocks=load.reserved_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=load.queued_tokens,
        computed_prompt_tokens=totals.computed_prompt_tokens,
        cached_prompt_tokens=totals.cached_prompt_tokens,
        output_tokens=totals.output_tokens,
        num_steps=totals.num_steps,
    )


def _load(settings: EngineSettings) -> LoadedModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_model(
        source=settings.model,
        cache_dir=cache_dir(),
        device=settings.device,
        backend=settings.backend,
        numerics=settings.numerics,
        kv_format=settings.kv_format,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory_mib << 20,
        max_model_len=settings.max_model_len,
        progress=log.info,
    )
    model.warm_up()
    if model.exact:
        log.info("exact: true", extra=fields(numerics=model.numerics))
    else:
        log.warning("exact: false", extra=fields(numerics=model.numerics, reason=model.inexact_reason))
    return model


def _worker_info(holder: Holder, role: "worker_pb2.Role", model: LoadedModel) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=holder.worker_id,
        role=role,
        incarnation=holder.incarnation,
        identity=types_pb2.ModelIdentity(
            model_name=model.prepared.name,
            fingerprint=model.fingerprint,
            layout=layout_to_pb(model.layout),
            numerics=model.numerics,
            exact=model.exact,
            inexact_reason=model.inexact_reason,
            max_model_len=model.max_model_len,
            vocab_size=model.config.vocab_size,
            narrower_fingerprints={str(name): value for name, value in model.narrower_fingerprints.items()},
        ),
        total_blocks=model.num_blocks,
        tokenizer_digest=model.prepared.tokenizer_digest,
        backend=model.ops.description,
    )


def _make_publisher(settings: EngineSettings, holder: Holder, service: WorkerService) -> IndexPublisher | None:
    if settings.redis_url is None:
        return None
    index = RedisPrefixIndex(settings.redis_url, INDEX_NAMESPACE)
    return IndexPublisher(index, holder, service.take_index_changes, service.held_hashes)
