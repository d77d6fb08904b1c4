"""Puts the gateway together, runs it, and ends it in order: no new work, open streams, releases, connections."""

import asyncio
import logging
import secrets
import socket
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry

from common.config import state_dir
from common.faults.injector import install
from common.logs import fields
from common.prefix_index.base import INDEX_NAMESPACE, PrefixIndex
from common.prefix_index.redis import RedisPrefixIndex
from common.rpc.address import is_loopback
from common.rpc.channel import Connector
from common.rpc.tls import load_identity
from common.stop_signals import stop_signals
from common.telemetry.setup import Telemetry, setup_telemetry
from common.tokenizer import Tokenizer
from gateway.admission import Admission
from gateway.app import create_app
from gateway.config import GatewaySettings, read_api_keys, read_operator_key, read_server_secret
from gateway.deployment import Deployment
from gateway.discovery import Discovery
from gateway.dispatch import DispatchPolicy, HandOffDispatcher
from gateway.fleet import RegistryFleet
from gateway.http_server import HttpServer, bind, url_of
from gateway.metrics import DispatchMetrics, show_peak_memory
from gateway.observe import TelemetryObserver
from gateway.operator_access import OperatorAccess
from gateway.placement import Role
from gateway.prefix_lookup import PrefixLookup
from gateway.readiness import Readiness
from gateway.registry import Registry
from gateway.served_model import ModelCard, ModelHolder, ServedModel
from gateway.services import GatewayLimits, GatewayServices
from gateway.worker_metrics import WorkerCollector

log = logging.getLogger("twostroke.gateway")

SECRET_BYTES = 32


class Gateway:
    """All parts of one gateway process. Made inside the event loop; `close` ends what it holds."""

    def __init__(self, settings: GatewaySettings, telemetry: Telemetry) -> None:
        """Raises ConfigError when a file or an address is wrong."""
        clock = time.monotonic
        prometheus = CollectorRegistry()
        metrics = DispatchMetrics(prometheus)
        self.admission = Admission(settings.max_active_requests)
        self.registry = Registry(model_name=settings.model_name, connector=Connector(load_identity(settings.tls_dir)))
        prometheus.register(WorkerCollector(self.registry.workers))
        show_peak_memory(prometheus)
        self.discovery = Discovery(
            {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode},
            self.registry.set_addresses,
            settings.discovery_interval_s,
        )
        self.readiness = Readiness(
            self.registry,
            self.discovery,
            self.admission,
            needs_prefill=settings.strict and bool(settings.prefill),
        )
        self.model = ModelHolder()
        self._told_inexact = ""
        self._index = _make_index(settings)
        metrics.index_available(self._index is not None)  # until the first look-up says otherwise
        lookup = PrefixLookup(self._index, settings.index_timeout_ms / 1000, clock, metrics.index_available)
        self.dispatcher = HandOffDispatcher(
            self.registry,
            lookup,
            self.admission,
            _policy(settings),
            _server_secret(settings),
            metrics,
            telemetry.tracer,
            clock,
        )
        self.services = GatewayServices(
            dispatcher=self.dispatcher,
            model=self.model,
            observer=TelemetryObserver(telemetry.tracer, prometheus),
            registry=prometheus,
            fleet=RegistryFleet(self.registry),
            operator=OperatorAccess(
                read_operator_key(settings.operator_key_file) if settings.operator_key_file else None,
                is_local=is_loopback(settings.host),
            ),
            why_not_ready=self.readiness.why_not_ready,
            tenants_by_api_key=read_api_keys(settings.api_keys_file) if settings.api_keys_file else None,
            limits=GatewayLimits(max_body_bytes=settings.max_body_bytes, max_retries=settings.max_retries),
            clock=clock,
        )

    async def meet_workers(self, url: str) -> None:
        """Looks for workers until cancelled; says once that the gateway is ready."""
        tasks = (asyncio.create_task(self._announce(url)), asyncio.create_task(self.discovery.run()))
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.dispatcher.settled()
        await self.registry.close()
        if self._index is not None:
            await self._index.close()

    async def _announce(self, url: str) -> None:
        deployment = await self.registry.defined()
        # Reading a large vocabulary takes a while; the health endpoints must answer meanwhile.
        self.model.set(await asyncio.to_thread(make_served_model, deployment))
        while self.readiness.why_not_ready() is not None:
            await self.registry.next_change()
        self._tell_exactness()
        log.info("ready", extra=fields(url=url, model=deployment.model_name))
        while True:
            await self.registry.next_change()
            self._tell_exactness()

    def _tell_exactness(self) -> None:
        """Once, and again when a worker joins that changes it."""
        deployment, served = self.registry.deployment, self.model.current()
        assert deployment is not None
        assert served is not None
        if deployment.inexact_reason == self._told_inexact:
            return
        self._told_inexact = deployment.inexact_reason
        log.warning("exact: false", extra=fields(reason=deployment.inexact_reason))
        self.model.set(replace(served, card=replace(served.card, inexact_reason=deployment.inexact_reason)))


def make_served_model(deployment: Deployment) -> ServedModel:
    """Raises ModelLoadError when the tokenizer's files are not what this version reads."""
    files = deployment.tokenizer_files
    tokenizer = Tokenizer(files.get("tokenizer.json", b""), files.get("tokenizer_meta.json", b""))
    card = ModelCard(
        name=deployment.model_name,
        max_model_len=deployment.max_model_len,
        vocab_size=deployment.vocab_size,
        created=int(time.time()),
        numerics=deployment.numerics,
        inexact_reason="" if deployment.is_exact else deployment.inexact_reason,
    )
    return ServedModel(card, tokenizer)


async def run_gateway(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT and an orderly end. Raises ConfigError when it cannot start."""
    install(settings.fault_plan())
    bound = bind(settings.host, settings.port, settings.client_timeout_s)
    instance = f"{socket.gethostname()}-{bound.getsockname()[1]}"
    telemetry = setup_telemetry("twostroke-gateway", instance, state_dir())
    try:
        gateway = Gateway(settings, telemetry)
        try:
            await _serve(gateway, bound, settings)
        finally:
            await gateway.close()
    finally:
        bound.close()
        telemetry.shutdown()


async def _serve(gateway: Gateway, bound: socket.socket, settings: GatewaySettings) -> None:
    server = HttpServer(create_app(gateway.services), settings.client_timeout_s)
    with stop_signals() as signals:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        meeting = asyncio.create_task(gateway.meet_workers(url_of(bound)))
        stopped = asyncio.create_task(signals.get())
        tasks = (serving, meeting, stopped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await _drain(gateway.admission, settings.drain_grace_s, signals)
        finally:
            server.should_exit = True
            meeting.cancel()
            stopped.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _drain(admission: Admission, grace_s: float, signals: "asyncio.Queue[str]") -> None:
    """New requests get 503, open streams may end for `grace_s`; a second signal cuts it short."""
    admission.close()
    log.info("draining for up to %g s", grace_s, extra=fields(num_active=admission.num_active))
    idle = asyncio.create_task(admission.idle())
    impatience = asyncio.create_task(signals.get())
    await asyncio.wait({idle, impatience}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        log.warning("not idle after %g s or a second signal: %d streams are cut", grace_s, admission.num_active)
    for task in (idle, impatience):
        task.cancel()
    await asyncio.gather(idle, impatience, return_exceptions=True)


def _make_index(settings: GatewaySettings) -> PrefixIndex | None:
    if settings.redis_url is None:
        return None
    return RedisPrefixIndex(settings.redis_url, INDEX_NAMESPACE, lookup_timeout_s=settings.index_timeout_ms / 1000)


def _policy(settings: GatewaySettings) -> DispatchPolicy:
    return DispatchPolicy(
        has_prefill=bool(settings.prefill),
        strict=settings.strict,
        max_retries=settings.max_retries,
        prefill_window_tokens=settings.prefill_window_tokens,
        on_failure=settings.on_failure,
        retry_ratio=settings.retry_ratio,
        retry_reserve=settings.retry_reserve,
        progress_timeout_s=settings.progress_timeout_s,
        reconnect_wait_s=settings.reconnect_wait_s,
    )


def _server_secret(settings: GatewaySettings) -> bytes:
    """Drawn anew where none is configured: prefixes are then not shared with other gateways, nor after a restart."""
    if settings.server_secret_file is None:
        return secrets.token_bytes(SECRET_BYTES)
    return read_server_secret(settings.server_secret_file)
