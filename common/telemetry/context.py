"""Spans from code that runs in an engine's thread: explicit parent, explicit times."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Tracer

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]


def current_context() -> Context:
    """The caller's context, to be carried to another thread and given to `record_span` there."""
    return otel_context.get_current()


def record_span(
    tracer: Tracer,
    name: str,
    start_ns: int,
    end_ns: int,
    context: Context,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """A span that is over already, as a child of the span in `context`. Times are wall-clock nanoseconds.

    Safe in any thread. A span never ends before it starts.
    """
    span = tracer.start_span(name, context=context, attributes=attributes, start_time=start_ns)
    span.end(max(start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class SpanClock:
    """Maps the monotonic clock (seconds), which durations are measured by, to the wall clock (ns) of spans.

    One pair of readings for the life of the clock: spans of one process keep their order and lengths even when the
    wall clock is set.
    """

    monotonic_s: float = field(default_factory=time.monotonic)
    wall_ns: int = field(default_factory=time.time_ns)

    def to_wall_ns(self, monotonic_s: float) -> int:
        return self.wall_ns + round((monotonic_s - self.monotonic_s) * 1e9)
