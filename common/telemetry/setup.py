"""One process's tracer: OTLP where the standard OTEL_* variables ask for it, else a bounded local file."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from common.config import TraceDestination, trace_destination
from common.telemetry.context import SpanClock
from common.telemetry.span_file import SERVICE_NAME, SpanFileExporter, span_file

TRACER_NAME = "twostroke"
FILE_DELAY_MS = 200
"""How soon a finished span can be read from the local file."""
FLUSH_TIMEOUT_S = 3.0
"""How long an unreachable collector may hold up the end of a process."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A tracer, and the clock that maps its process's monotonic times to span times."""

    provider: TracerProvider
    tracer: Tracer
    clock: SpanClock = field(default_factory=SpanClock)

    def shutdown(self) -> None:
        """Flushes what is pending, for up to FLUSH_TIMEOUT_S."""
        flushing = threading.Thread(target=self.provider.shutdown, name="telemetry-flush", daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT_S)


def setup_telemetry(service_name: str, worker_id: str, state_dir: Path) -> Telemetry:
    """`service_name` is `twostroke-gateway` and the like; `worker_id` tells apart the processes of one service.

    Raises ConfigError when an OTEL_* variable asks for what is not there.
    """
    destination = trace_destination()
    if destination is TraceDestination.OFF:
        return make_telemetry(service_name, worker_id, ())
    if destination is TraceDestination.LOCAL_FILE:
        exporter = SpanFileExporter(span_file(state_dir, service_name, worker_id))
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=FILE_DELAY_MS)
    else:
        processor = BatchSpanProcessor(_otlp_exporter(destination))
    return make_telemetry(service_name, worker_id, (processor,))


def make_telemetry(service_name: str, worker_id: str, processors: Sequence[SpanProcessor]) -> Telemetry:
    """A tracer whose spans go through `processors`; tests give one with an in-memory exporter."""
    resource = Resource.create(
        {SERVICE_NAME: service_name, "service.instance.id": worker_id, "service.version": _version()}
    )
    # At exit the services flush in `shutdown`, which is bounded; the SDK's own hook is not.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    return Telemetry(provider, provider.get_tracer(TRACER_NAME))


def _otlp_exporter(destination: TraceDestination) -> SpanExporter:
    """Imported here, since one protocol's client is never needed where the other's is."""
    if destination is TraceDestination.OTLP_GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def _version() -> str:
    try:
        return version("twostroke")
    except PackageNotFoundError:
        return "unknown"
