"""Spans reach a collector by both protocols, when the standard variables name one."""

import http.server
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from common.telemetry.setup import setup_telemetry
from common.telemetry.span_file import spans_folder

Received = queue.Queue[ExportTraceServiceRequest]
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@contextmanager
def grpc_collector(received: Received) -> Iterator[str]:
    def export(request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        received.put(request)
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector(received: Received) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.put(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", grpc_collector), ("http/protobuf", http_collector)])
def test_spans_reach_the_collector(
    protocol: str, collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: Received = queue.Queue()
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    with collector(received) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        telemetry = setup_telemetry("twostroke-decode", "decode-0", tmp_path)
        telemetry.tracer.start_span("decode.stream", attributes={"twostroke.num_blocks": 3}).end()
        telemetry.shutdown()
    resource_spans = received.get(timeout=60).resource_spans[0]
    resource = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("twostroke-decode", "decode-0")
    assert [span.name for span in resource_spans.scope_spans[0].spans] == ["decode.stream"]
    assert not spans_folder(tmp_path).exists()
