"""One trace over every hop: the caller's span is the parent of what the handler starts, for each kind of call."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry.setup import Telemetry, make_telemetry
from tests.support.echo_service import KINDS, call, running_echo


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    return make_telemetry("test", "0", (SimpleSpanProcessor(exporter),))


def handlers(telemetry: Telemetry) -> dict[str, Any]:
    def work() -> bytes:
        with telemetry.tracer.start_as_current_span("handler"):
            return b"done"

    async def unary_unary(request: bytes, context: Any) -> bytes:
        return work()

    async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield work()

    async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
        assert [request async for request in requests] == [b"a", b"b"]
        return work()

    async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield work()

    return {handler.__name__: handler for handler in (unary_unary, unary_stream, stream_unary, stream_stream)}


def by_name(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_handlers_span_is_a_child_of_the_callers(
    kind: str, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    async with running_echo(**handlers(telemetry)) as channel:
        with telemetry.tracer.start_as_current_span("caller"):
            await call(channel, kind, b"a", b"b")
    caller = by_name(exporter, "caller")[0].context
    for span in by_name(exporter, "handler"):
        assert span.context is not None
        assert caller is not None
        assert span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (caller.trace_id, caller.span_id)
        assert span.parent.is_remote
    assert len(by_name(exporter, "handler")) == (2 if kind == "stream_stream" else 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_without_a_trace_stay_apart(
    kind: str, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    async with running_echo(**handlers(telemetry)) as channel:
        await call(channel, kind, b"a", b"b")
        with telemetry.tracer.start_as_current_span("caller"):
            await call(channel, kind, b"a", b"b")
        await call(channel, kind, b"a", b"b")
    parents = [span.parent is None for span in by_name(exporter, "handler")]
    assert (parents[0], parents[-1]) == (True, True)
    assert parents.count(False) == (2 if kind == "stream_stream" else 1)


async def test_the_callers_own_metadata_is_kept(telemetry: Telemetry) -> None:
    seen: dict[str, Any] = {}

    async def handle(request: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        return b""

    async with running_echo(unary_unary=handle) as channel:
        with telemetry.tracer.start_as_current_span("caller") as span:
            method = channel.unary_unary("/twostroke.test.Echo/unary_unary")
            await method(b"x", metadata=(("x-mine", "1"), ("x-raw-bin", b"\x00\xff")))
    assert (seen["x-mine"], seen["x-raw-bin"]) == ("1", b"\x00\xff")
    assert f"{span.get_span_context().trace_id:032x}" in seen["traceparent"]


async def test_nothing_leaks_into_the_callers_context(telemetry: Telemetry) -> None:
    async with running_echo(**handlers(telemetry)) as channel:
        await call(channel, "unary_unary", b"a")
    assert not trace.get_current_span().get_span_context().is_valid
