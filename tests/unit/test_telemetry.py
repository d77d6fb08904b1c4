"""Where spans go, who they say they are, and spans recorded by an engine's thread."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.config import TraceDestination, trace_destination
from common.errors import ConfigError
from common.telemetry.context import SpanClock, current_context, record_span
from common.telemetry.setup import make_telemetry, setup_telemetry
from common.telemetry.span_file import read_spans, spans_folder

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine exports must not steer these tests."""
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", *ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, TraceDestination.LOCAL_FILE),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, TraceDestination.LOCAL_FILE),
        (ENDPOINT, TraceDestination.OTLP_GRPC),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, TraceDestination.OTLP_GRPC),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TraceDestination.OTLP_GRPC),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, TraceDestination.OTLP_HTTP),
        (
            {
                **ENDPOINT,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            TraceDestination.OTLP_HTTP,
        ),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, TraceDestination.OFF),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, TraceDestination.OFF),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, TraceDestination.OTLP_GRPC),
    ],
)
def test_the_standard_variables_choose_the_destination(environ: Mapping[str, str], expected: TraceDestination) -> None:
    assert trace_destination(environ) is expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'"),
    ],
)
def test_what_is_not_supported_is_named(environ: Mapping[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        trace_destination(environ)


def test_spans_say_whose_they_are(tmp_path: Path) -> None:
    telemetry = setup_telemetry("twostroke-decode", "decode-0", tmp_path)
    resource = telemetry.provider.resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("twostroke-decode", "decode-0")
    assert resource["service.version"]
    telemetry.shutdown()


def test_shutdown_writes_what_is_pending(tmp_path: Path) -> None:
    telemetry = setup_telemetry("twostroke-decode", "decode-0", tmp_path)
    telemetry.tracer.start_span("last words").end()
    telemetry.shutdown()
    assert [span.name for span in read_spans(spans_folder(tmp_path))] == ["last words"]


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"])
def test_turned_off_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "true" if name == "OTEL_SDK_DISABLED" else "none")
    telemetry = setup_telemetry("twostroke-decode", "decode-0", tmp_path)
    telemetry.tracer.start_span("unheard").end()
    telemetry.shutdown()
    assert not spans_folder(tmp_path).exists()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_otlp_exporters_exist_for_both_protocols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    telemetry = setup_telemetry("twostroke-decode", "decode-0", tmp_path)
    telemetry.shutdown()
    assert not spans_folder(tmp_path).exists()


def test_an_engines_thread_records_spans_under_the_requests() -> None:
    exporter = InMemorySpanExporter()
    telemetry = make_telemetry("decode", "0", (SimpleSpanProcessor(exporter),))
    with telemetry.tracer.start_as_current_span("request") as request:
        context = current_context()

    def work() -> None:
        record_span(telemetry.tracer, "prefill.chunk", 5_000, 9_000, context, {"twostroke.num_tokens": 256})
        record_span(telemetry.tracer, "kv.push", 9_000, 8_000, context)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    chunk, push = (span for span in exporter.get_finished_spans() if span.name != "request")
    assert (chunk.start_time, chunk.end_time) == (5_000, 9_000)
    assert dict(chunk.attributes or {}) == {"twostroke.num_tokens": 256}
    for span in (chunk, push):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
    assert (push.start_time, push.end_time) == (9_000, 9_000), "a span never ends before it starts"


def test_the_clock_keeps_order_and_length() -> None:
    clock = SpanClock(monotonic_s=1_000.0, wall_ns=5_000_000_000_000)
    assert clock.to_wall_ns(1_000.0) == 5_000_000_000_000
    assert clock.to_wall_ns(1_001.25) == 5_001_250_000_000
    assert clock.to_wall_ns(999.5) == 4_999_500_000_000
