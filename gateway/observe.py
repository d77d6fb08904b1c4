"""Requests as spans and metrics. The HTTP surface knows only `RequestObserver`; names come from `common.telemetry`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.telemetry import names
from gateway.record import Choice, RequestRecord, Usage, ttft_parts, ttft_s

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class RequestObserver(Protocol):
    """Sees each request twice: entered when its head arrived, left after its last byte, the record complete by then."""

    def observe(self, record: RequestRecord, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Around a whole request. Fills in the record's trace ids on entry, where it is traced."""

    def tokenizing(self) -> AbstractContextManager[None]:
        """Around chat template and tokenizer, inside `observe`."""


class TelemetryObserver:
    """The root span `gateway.request` of each generation, and the histograms and counters of all requests."""

    def __init__(self, tracer: Tracer, registry: CollectorRegistry) -> None:
        self._tracer = tracer
        self._metrics = _RequestMetrics(registry)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def observe(self, record: RequestRecord, headers: Mapping[str, str]) -> Iterator[None]:
        try:
            if record.path in GENERATION_PATHS:
                with self._metrics.active.track_inprogress(), self._root_span(record, headers):
                    yield
            else:
                yield
        finally:
            self._metrics.count(record)

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        with self._span(names.SPAN_TOKENIZE):
            yield

    @contextmanager
    def _root_span(self, record: RequestRecord, headers: Mapping[str, str]) -> Iterator[None]:
        """A child of the caller's span where the request brought a `traceparent`."""
        with self._span(names.SPAN_REQUEST, self._propagator.extract(headers), SpanKind.SERVER) as span:
            _tell_trace_ids(record, span)
            try:
                yield
            finally:
                _describe(record, span)

    def _span(
        self, name: str, parent: Context | None = None, kind: SpanKind = SpanKind.INTERNAL
    ) -> AbstractContextManager[Span]:
        # Of an error only its code is told: a message may quote the prompt.
        return self._tracer.start_as_current_span(
            name, parent, kind, record_exception=False, set_status_on_exception=False
        )


class _RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str) -> Histogram:
            return Histogram(name, documentation, buckets=names.LATENCY_BUCKETS_S, registry=registry)

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name.removesuffix("_total"), documentation, labels, registry=registry)

        self.active = Gauge(names.METRIC_ACTIVE_REQUESTS, "Generation requests in progress", registry=registry)
        self._ttft = histogram(names.METRIC_TTFT, "To the first byte that a streaming client sees")
        self._tpot = histogram(names.METRIC_TPOT, "Per output token after the first, of one choice")
        self._exposed_transfer = histogram(
            names.METRIC_EXPOSED_TRANSFER, "From the first token until decode had its KV"
        )
        self._duration = histogram(names.METRIC_DURATION, "Of answered generation requests, to their last byte")
        self._requests = counter(names.METRIC_REQUESTS, "HTTP requests", "route", "status")
        self._prompt_tokens = counter(names.METRIC_PROMPT_TOKENS, "Prompt tokens of started generations")
        self._cached_tokens = counter(names.METRIC_CACHED_TOKENS, "Prompt tokens that were not computed again")
        self._output_tokens = counter(names.METRIC_OUTPUT_TOKENS, "Tokens delivered")

    def count(self, record: RequestRecord) -> None:
        self._requests.labels(record.route, str(record.status)).inc()
        if not record.choices:
            return
        usage = Usage.of(record.choices)
        self._prompt_tokens.inc(usage.num_prompt_tokens)
        self._cached_tokens.inc(usage.num_cached_tokens)
        self._output_tokens.inc(usage.num_output_tokens)
        first = record.first_visible_choice()
        if first is not None and record.is_streamed:
            self._ttft.observe(ttft_s(first.generation.times))
        for tpot_s in _tpots_s(record.choices):
            self._tpot.observe(tpot_s)
        for choice in record.choices:
            if choice.generation.transfer.exposed_s is not None:
                self._exposed_transfer.observe(choice.generation.transfer.exposed_s)
        if record.status == 200:
            self._duration.observe(record.finished - record.received)


def _tpots_s(choices: list[Choice]) -> list[float]:
    return [choice.tpot_s for choice in choices if choice.tpot_s is not None]


def _tell_trace_ids(record: RequestRecord, span: Span) -> None:
    span_context = span.get_span_context()
    if span_context.is_valid:
        record.trace_id = format_trace_id(span_context.trace_id)
        span_id = format_span_id(span_context.span_id)
        record.traceresponse = f"00-{record.trace_id}-{span_id}-{span_context.trace_flags:02x}"


def _describe(record: RequestRecord, span: Span) -> None:
    span.set_attribute(names.ATTR_HTTP_STATUS, record.status)
    if record.error_code:
        span.set_attribute(names.ATTR_ERROR_TYPE, record.error_code)
    if record.status >= 500:
        span.set_status(StatusCode.ERROR)
    if not record.choices:
        return
    usage = Usage.of(record.choices)
    span.set_attributes(
        {
            names.ATTR_OPERATION: record.operation,
            names.ATTR_REQUEST_MODEL: record.model,
            names.ATTR_RESPONSE_ID: record.request_id or "",
            names.ATTR_INPUT_TOKENS: usage.num_prompt_tokens,
            names.ATTR_CACHED_TOKENS: usage.num_cached_tokens,
            names.ATTR_OUTPUT_TOKENS: usage.num_output_tokens,
            names.ATTR_FINISH_REASONS: [str(choice.finish_reason or "none") for choice in record.choices],
        }
    )
    first = record.first_visible_choice()
    _describe_route(first or record.choices[0], span)
    if first is not None:
        span.set_attribute(names.ATTR_TTFT, ttft_s(first.generation.times))
        span.set_attributes(dict(ttft_parts(first.generation.times)))
    if usage.exposed_transfer_s is not None:
        span.set_attribute(names.ATTR_EXPOSED_TRANSFER, usage.exposed_transfer_s)
    tpots_s = _tpots_s(record.choices)
    if tpots_s:
        span.set_attribute(names.ATTR_TPOT, sum(tpots_s) / len(tpots_s))


def _describe_route(choice: Choice, span: Span) -> None:
    """Of the choice that the client saw first; what the dispatcher left empty is left out."""
    route = choice.route
    attributes = {
        names.ATTR_PREFILL_WORKER: route.prefill_worker,
        names.ATTR_DECODE_WORKER: route.decode_worker,
        names.ATTR_PLACEMENT_REASON: route.reason,
        names.ATTR_FALLBACK: route.fallback,
        names.ATTR_ON_FAILURE: choice.generation.on_failure or "",
    }
    span.set_attributes({name: value for name, value in attributes.items() if value})
