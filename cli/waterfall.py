"""Draws one trace as text: a tree of spans on a time axis, and the time to first token taken apart. Pure functions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from common.telemetry import names
from common.telemetry.span_file import SpanRecord

MIN_BAR_WIDTH = 16
_SERVICE_COLOURS = {"gateway": 36, "prefill": 33, "decode": 32}  # ANSI: cyan, yellow, green
_OTHER_COLOUR = 35


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    service: str
    span: SpanRecord
    duration: str


def draw_trace(spans: Sequence[SpanRecord], width: int, *, colour: bool = False) -> str:
    """The waterfall of one trace, `width` columns wide where names leave room for bars. Precondition: has spans."""
    rows = [
        _Row("  " * depth + span.name, span.service.removeprefix("twostroke-"), span, _duration(span))
        for depth, span in _tree(spans)
    ]
    label_width = max(len(row.label) for row in rows)
    service_width = max(len(row.service) for row in rows)
    duration_width = max(len(row.duration) for row in rows)
    bar_width = max(MIN_BAR_WIDTH, width - label_width - service_width - duration_width - 6)
    began = min(span.start_ns for span in spans)
    total_ns = max(1, max(span.end_ns for span in spans) - began)
    lines = [*_title(spans, began), ""]
    for row in rows:
        bar = _bar(row.span, began, total_ns, bar_width)
        columns = f"{row.label:<{label_width}}  {row.service:<{service_width}}  {row.duration:>{duration_width}}  "
        lines.append((columns + (_coloured(bar, row.service) if colour else bar)).rstrip())
    margin = " " * (label_width + service_width + duration_width + 6)
    lines += [margin + _axis(total_ns, bar_width), ""]
    request = request_span(spans)
    lines += draw_latency(request.attributes) if request else ["This trace has no gateway.request span yet."]
    return "\n".join(lines) + "\n"


def draw_latency(attributes: Mapping[str, Any]) -> list[str]:
    """TTFT with its parts in milliseconds and shares, and TPOT; from the attributes of a `gateway.request` span."""
    ttft_s = attributes.get(names.ATTR_TTFT)
    if ttft_s is None:
        return ["No token was sent, so there is no time to first token."]
    lines = [_part("TTFT", ttft_s, ttft_s)]
    parts = [(_part_label(name), attributes.get(name, 0.0)) for name in names.TTFT_PARTS]
    rest_s = ttft_s - sum(seconds for _, seconds in parts)
    lines += [_part(f"  {label}", seconds, ttft_s) for label, seconds in [*parts, ("not accounted", rest_s)]]
    tpot_s = attributes.get(names.ATTR_TPOT)
    if tpot_s is not None:
        num_tokens = attributes.get(names.ATTR_OUTPUT_TOKENS, 0)
        lines.append(f"{'TPOT':<16}{tpot_s * 1e3:10.1f} ms   ({num_tokens} output tokens)")
    return lines


def summarize(spans: Sequence[SpanRecord]) -> str:
    """One trace in one line: id, start, duration, TTFT, TPOT, tokens, response id."""
    began = min(span.start_ns for span in spans)
    total_ms = (max(span.end_ns for span in spans) - began) / 1e6
    request = request_span(spans)
    attributes = request.attributes if request else {}
    ttft, tpot = (_optional_ms(attributes.get(name)) for name in (names.ATTR_TTFT, names.ATTR_TPOT))
    counts = "/".join(str(attributes.get(name, "-")) for name in (names.ATTR_INPUT_TOKENS, names.ATTR_OUTPUT_TOKENS))
    response_id = attributes.get(names.ATTR_RESPONSE_ID, "-")
    start = _clock_time(began)
    return f"{spans[0].trace_id}  {start}  {total_ms:10.1f}  {ttft:>8}  {tpot:>8}  {counts:>9}  {response_id}"


SUMMARY_HEADER = (
    f"{'trace':<32}  {'started (UTC)':<19}  {'total ms':>10}  {'TTFT ms':>8}  {'TPOT ms':>8}  {'tokens':>9}  response"
)


def request_span(spans: Iterable[SpanRecord]) -> SpanRecord | None:
    return next((span for span in spans if span.name == names.SPAN_REQUEST), None)


def _tree(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """Depth first, siblings by start. A span whose parent is not on file (a client's, or a lost one) is a root."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[SpanRecord]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, span.span_id)):
        children[span.parent_id if span.parent_id in known else None].append(span)
    stack = [(0, span) for span in reversed(children[None])]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(children[span.span_id])]


def _title(spans: Sequence[SpanRecord], began_ns: int) -> Iterator[str]:
    request = request_span(spans)
    attributes = request.attributes if request else {}
    yield _joined(f"trace {spans[0].trace_id}", f"{_clock_time(began_ns)} UTC", attributes.get(names.ATTR_RESPONSE_ID))
    workers = [attributes.get(name) for name in (names.ATTR_PREFILL_WORKER, names.ATTR_DECODE_WORKER)]
    route = " → ".join(worker for worker in workers if worker)
    fallback = attributes.get(names.ATTR_FALLBACK)
    if route:
        reason = attributes.get(names.ATTR_PLACEMENT_REASON)
        yield _joined(f"route {route}", reason and f"placed by {reason}", fallback and f"fallback: {fallback}")


def _joined(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _clock_time(wall_ns: int) -> str:
    return f"{datetime.fromtimestamp(wall_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def _duration(span: SpanRecord) -> str:
    failed = "failed " if span.status == "ERROR" else ""
    return f"{failed}{(span.end_ns - span.start_ns) / 1e6:.1f} ms"


def _bar(span: SpanRecord, began_ns: int, total_ns: int, width: int) -> str:
    """At least one cell, so that a short span is seen."""
    first = min((span.start_ns - began_ns) * width // total_ns, width - 1)
    last = max(first + 1, -(-(span.end_ns - began_ns) * width // total_ns))
    return " " * first + "█" * (last - first)


def _axis(total_ns: int, width: int) -> str:
    end = f"{total_ns / 1e6:.1f} ms"
    return f"{'0':<{width - len(end)}}{end}"


def _coloured(bar: str, service: str) -> str:
    colour = next((code for role, code in _SERVICE_COLOURS.items() if role in service), _OTHER_COLOUR)
    return f"\x1b[{colour}m{bar}\x1b[0m"


def _part(label: str, seconds: float, ttft_s: float) -> str:
    return f"{label:<16}{seconds * 1e3:10.1f} ms {100 * seconds / ttft_s if ttft_s else 0:6.1f} %"


def _part_label(name: str) -> str:
    return name.rsplit(".", 1)[-1].removesuffix("_s")


def _optional_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
