"""Records what an engine's thread has timed, as spans of one call."""

from collections.abc import Mapping

from opentelemetry.context import Context

from common.telemetry.context import AttributeValue, record_span
from common.telemetry.setup import Telemetry


class SpanRecorder:
    """Spans become children of the span in `context`; times are on the monotonic clock, in seconds."""

    def __init__(self, telemetry: Telemetry, context: Context) -> None:
        self._telemetry = telemetry
        self._context = context

    def record(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, AttributeValue]) -> None:
        clock = self._telemetry.clock
        start_ns, end_ns = clock.to_wall_ns(start_s), clock.to_wall_ns(end_s)
        record_span(self._telemetry.tracer, name, start_ns, end_ns, self._context, attributes)
