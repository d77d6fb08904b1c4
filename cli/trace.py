"""`twostroke trace`: where a request's time went, from the spans that local services left on file."""

import argparse
import shutil
import sys
from pathlib import Path

from cli.config import spans_dir, wants_colour
from cli.errors import CommandError
from cli.program import program
from cli.waterfall import SUMMARY_HEADER, draw_trace, request_span, summarize
from common.telemetry import names
from common.telemetry.span_file import SpanRecord, latest_trace_id, read_spans, spans_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        nargs="?",
        default="",
        help="a trace id, its beginning, or a response id (chatcmpl-...); default: the last",
    )
    parser.add_argument("--all", action="store_true", help="list every trace on file, one line each")


def run(arguments: argparse.Namespace) -> int:
    spans = read_spans(spans_dir())
    if not spans:
        raise CommandError(f"no spans in {spans_dir()}; ask a local stack something first (twostroke run)")
    if arguments.all:
        _list_traces(spans)
        return 0
    trace_id = find_trace(spans, arguments.id, spans_dir())
    width = shutil.get_terminal_size(fallback=(100, 24)).columns
    sys.stdout.write(draw_trace(spans_of(spans, trace_id), width, colour=wants_colour(sys.stdout)))
    return 0


def find_trace(spans: list[SpanRecord], wanted: str, folder: Path) -> str:
    """The id of the trace that `wanted` names; empty: the last one. CommandError when none or several match."""
    if not wanted:
        latest = latest_trace_id(spans)
        assert latest is not None
        return latest
    matches = {
        span.trace_id
        for span in spans
        if span.trace_id.startswith(wanted.lower()) or span.attributes.get(names.ATTR_RESPONSE_ID) == wanted
    }
    if len(matches) > 1:
        raise CommandError(f"{wanted!r} is the beginning of {len(matches)} traces; give more of it")
    if not matches:
        raise CommandError(f"no trace {wanted!r} in {folder}; {program()} trace --all lists what is there")
    return matches.pop()


def _list_traces(spans: list[SpanRecord]) -> None:
    """Requests only, oldest first; spans without one are a worker's own."""
    requests = sorted(
        {span.trace_id: span.start_ns for span in spans if request_span([span])}.items(), key=lambda i: i[1]
    )
    print(SUMMARY_HEADER)
    for trace_id, _ in requests:
        print(summarize(spans_of(spans, trace_id)))
