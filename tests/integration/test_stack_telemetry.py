"""What a whole stack tells others: spans to an OTLP collector of its environment's choice, metrics to Prometheus."""

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from common.telemetry import names
from common.telemetry.span_file import spans_folder
from tests.contract.test_otlp import Received, grpc_collector
from tests.support.stack_process import StackProcess, stack_process
from tests.support.tiny_models import make_tiny_model

CHUNK = 32
HOPS = {
    names.SPAN_REQUEST: "twostroke-gateway",
    names.SPAN_RESERVE: "twostroke-gateway",
    names.SPAN_PREFILL_CHUNK: "twostroke-prefill",
    names.SPAN_KV_PUSH: "twostroke-prefill",
    names.SPAN_KV_COMMIT: "twostroke-prefill",
    names.SPAN_DECODE_STREAM: "twostroke-decode",
}


@pytest.fixture(scope="module")
def received() -> Received:
    return queue.Queue()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, received: Received) -> Iterator[StackProcess]:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")
    with grpc_collector(received) as endpoint, pytest.MonkeyPatch.context() as environment:
        for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
            environment.delenv(name, raising=False)
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("TWOSTROKE_PREFILL_MAX_NUM_BATCHED_TOKENS", str(CHUNK))
        with stack_process(tmp_path_factory.mktemp("state"), "1p1d", str(model), "--no-speculation") as running:
            yield running


def spans_of(received: Received, trace_id: str, wanted: set[str]) -> list[tuple[str, Span]]:
    """(service, span) of the trace, once all the wanted names are among them."""
    found: list[tuple[str, Span]] = []
    while not wanted <= {span.name for _, span in found}:
        for resource_spans in received.get(timeout=60).resource_spans:
            resource = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
            spans = (span for scope in resource_spans.scope_spans for span in scope.spans)
            found += [(resource["service.name"], span) for span in spans if span.trace_id.hex() == trace_id]
    return found


def test_every_hop_s_spans_reach_the_collector_as_one_trace(stack: StackProcess, received: Received) -> None:
    body = stack.complete("The engine takes a prompt.", max_tokens=100, temperature=0, ignore_eos=True)
    found = spans_of(received, body["headers"]["x-twostroke-trace-id"], set(HOPS))
    services = {span.name: service for service, span in found}
    assert {name: services[name] for name in HOPS} == HOPS
    roots = [span.name for _, span in found if not span.parent_span_id]
    assert roots == [names.SPAN_REQUEST], "everything else hangs below the request"
    assert not spans_folder(stack.state_dir).exists(), "what goes to a collector does not go to the disk too"


def test_blocks_are_pushed_while_later_chunks_are_computed(stack: StackProcess, received: Received) -> None:
    body = stack.complete("What is the capital of France? " * 60, max_tokens=100, temperature=0, ignore_eos=True)
    found = spans_of(received, body["headers"]["x-twostroke-trace-id"], set(HOPS))
    chunks = [span for _, span in found if span.name == names.SPAN_PREFILL_CHUNK]
    pushes = [span for _, span in found if span.name == names.SPAN_KV_PUSH]
    assert len(chunks) == -(-body["usage"]["prompt_tokens"] // CHUNK)
    last_chunk = max(span.start_time_unix_nano for span in chunks)
    assert min(span.start_time_unix_nano for span in pushes) < last_chunk


def test_metrics_are_prometheus_s_and_named_as_it_asks(stack: StackProcess) -> None:
    stack.complete("The engine takes a prompt.", max_tokens=4, temperature=0)
    response = stack.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, f"{family.name} has no help text"
        assert family.type in ("counter", "gauge", "histogram"), f"{family.name} is {family.type}"
        samples = {sample.name for sample in family.samples}
        assert family.type != "counter" or samples <= {f"{family.name}_total", f"{family.name}_created"}
        assert family.type == "counter" or not any(name.endswith("_total") for name in samples)
        assert not family.name.endswith(("_ms", "_milliseconds", "_kib", "_mib", "_kilobytes")), "base units"
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    ours = {family.name.removesuffix("_created") for family in families}
    assert {name for name in ours if name not in documented and not name.startswith("twostroke_worker_")} == set()
