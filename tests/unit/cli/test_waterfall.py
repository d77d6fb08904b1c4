"""The drawing of a trace: one whole example against a golden file, and the shapes that an example does not have."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.waterfall import draw_latency, draw_trace, summarize
from common.telemetry import names
from common.telemetry.span_file import SpanRecord

GOLDEN = Path(__file__).parents[2] / "golden"
BEGAN_NS = 1_800_000_000 * 10**9
MS = 10**6

PARTS_S = dict(zip(names.TTFT_PARTS, (0.002, 0.001, 0.0005, 0.0015, 0.010, 0.080, 0.0, 0.003, 0.002), strict=True))
REQUEST_ATTRIBUTES = {
    names.ATTR_RESPONSE_ID: "chatcmpl-0123",
    names.ATTR_PREFILL_WORKER: "prefill-0",
    names.ATTR_DECODE_WORKER: "decode-0",
    names.ATTR_PLACEMENT_REASON: "load",
    names.ATTR_INPUT_TOKENS: 40,
    names.ATTR_OUTPUT_TOKENS: 9,
    names.ATTR_TTFT: 0.1,
    names.ATTR_TPOT: 0.0125,
    **PARTS_S,
}


def span(
    name: str, span_id: str, parent_id: str | None, start_ms: float, end_ms: float, service: str, status: str = "UNSET"
) -> SpanRecord:
    attributes = REQUEST_ATTRIBUTES if name == names.SPAN_REQUEST else {}
    times = (BEGAN_NS + round(start_ms * MS), BEGAN_NS + round(end_ms * MS))
    service = f"twostroke-{service}"
    return SpanRecord("4bf92f3577b34da6a3ce929d0e0e4736", span_id, parent_id, name, service, *times, attributes, status)


def whole_trace() -> list[SpanRecord]:
    return [
        span(names.SPAN_REQUEST, "01", "client", 0, 200, "gateway"),
        span(names.SPAN_TOKENIZE, "02", "01", 1, 3, "gateway"),
        span(names.SPAN_PLACE, "03", "01", 3, 3.5, "gateway"),
        span(names.SPAN_RESERVE, "04", "01", 3.5, 5, "decode"),
        span(names.SPAN_PREFILL_QUEUE, "05", "01", 6.5, 16.5, "prefill"),
        span(names.SPAN_PREFILL_CHUNK, "06", "01", 16.5, 60, "prefill"),
        span(names.SPAN_KV_PUSH, "08", "06", 60, 64, "prefill"),
        span(names.SPAN_PREFILL_CHUNK, "07", "01", 60, 96.5, "prefill"),
        span(names.SPAN_KV_COMMIT, "09", "01", 97, 99, "prefill", "ERROR"),
        span(names.SPAN_DECODE_STREAM, "10", "01", 100, 200, "decode"),
    ]


def test_a_whole_trace_is_drawn_as_the_golden_file_says() -> None:
    assert draw_trace(whole_trace(), width=100) == (GOLDEN / "trace_waterfall.txt").read_text()


def test_the_order_of_spans_on_file_does_not_matter() -> None:
    assert draw_trace(whole_trace()[::-1], width=100) == draw_trace(whole_trace(), width=100)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_stay_within_the_terminal(width: int) -> None:
    drawing = draw_trace(whole_trace(), width)
    span_lines = drawing.splitlines()[3:14]
    assert max(len(line) for line in span_lines) <= width


def test_colour_adds_nothing_but_escapes() -> None:
    coloured = draw_trace(whole_trace(), 100, colour=True)
    plain = coloured.replace("\x1b[0m", "")
    for code in (32, 33, 36):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == draw_trace(whole_trace(), 100)
    assert plain != coloured


def test_a_span_without_its_parent_on_file_is_a_root() -> None:
    drawing = draw_trace([span(names.SPAN_DECODE_STREAM, "10", "lost", 0, 1, "decode")], 80)
    assert drawing.splitlines()[2].startswith("decode.stream")
    assert "no gateway.request span yet" in drawing


def test_a_span_of_no_length_is_seen_and_divides_nothing_by_zero() -> None:
    assert "█" in draw_trace([span(names.SPAN_REQUEST, "01", None, 5, 5, "gateway")], 80)


def test_latency_without_a_token_says_so() -> None:
    assert draw_latency({}) == ["No token was sent, so there is no time to first token."]


def test_what_the_parts_leave_over_is_shown() -> None:
    attributes = {**REQUEST_ATTRIBUTES, names.ATTR_TTFT: 0.11}
    assert any(line.split()[:4] == ["not", "accounted", "10.0", "ms"] for line in draw_latency(attributes))


def test_a_summary_is_one_line_with_dashes_for_what_is_not_known() -> None:
    spans = whole_trace()
    assert summarize(spans).split()[3:] == ["200.0", "100.0", "12.5", "40/9", "chatcmpl-0123"]
    assert summarize([replace(spans[0], attributes={})]).split()[3:] == ["200.0", "-", "-", "-/-", "-"]
