"""Local spans: bounded files, readers that survive half lines, writers that never raise."""

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import Status, StatusCode

from common.telemetry.names import SPAN_REQUEST, SPAN_TOKENIZE
from common.telemetry.setup import make_telemetry
from common.telemetry.span_file import (
    SpanFileExporter,
    SpanRecord,
    latest_trace_id,
    read_spans,
    span_file,
    spans_folder,
    spans_of,
)


def record(trace_id: str, name: str, start_ns: int) -> SpanRecord:
    return SpanRecord(trace_id, f"{start_ns:016x}", None, name, "gateway", start_ns, start_ns + 1, {}, "UNSET")


def write(path: Path, *names: str, max_bytes: int = 2**20) -> None:
    telemetry = make_telemetry("decode", "0", (SimpleSpanProcessor(SpanFileExporter(path, max_bytes)),))
    for name in names:
        telemetry.tracer.start_span(name).end()
    telemetry.shutdown()


def test_a_span_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "decode-0.jsonl"
    telemetry = make_telemetry("decode", "0", (SimpleSpanProcessor(SpanFileExporter(path)),))
    attributes: dict[str, Any] = {"twostroke.num_blocks": 3, "a.b": [1.5, 2.5], "text": 'line\n"é"', "yes": True}
    with telemetry.tracer.start_as_current_span("parent") as parent:
        child = telemetry.tracer.start_span("child", attributes=attributes, start_time=1_000)
        child.set_status(Status(StatusCode.ERROR, "no"))
        child.end(2_500)
    first, second = read_spans(path.parent)
    context = parent.get_span_context()
    assert first == SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{child.get_span_context().span_id:016x}",
        parent_id=f"{context.span_id:016x}",
        name="child",
        service="decode",
        start_ns=1_000,
        end_ns=2_500,
        attributes=attributes,
        status="ERROR",
    )
    assert (second.name, second.parent_id, second.status) == ("parent", None, "UNSET")


def test_files_stay_bounded(tmp_path: Path) -> None:
    path, max_bytes = tmp_path / "decode-0.jsonl", 4_000
    write(path, *(f"span-{i}" for i in range(200)), max_bytes=max_bytes)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decode-0.jsonl", "decode-0.jsonl.1"]
    assert sum(file.stat().st_size for file in files) < 2 * (max_bytes + 500)
    kept = [span.name for span in read_spans(tmp_path)]
    assert kept == [f"span-{i}" for i in range(200 - len(kept), 200)], "the newest are kept, without a gap"


def test_an_older_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.jsonl"
    write(path, "before")
    write(path, "after")
    assert [span.name for span in read_spans(tmp_path)] == ["before", "after"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b'{"trace_id": "ab"}',
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe\x00",
        b"null",
        b"[" * 100_000,
        json.dumps({**dict.fromkeys(SpanRecord.__slots__, 0)}).encode(),
    ],
)
def test_lines_that_are_no_spans_are_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "decode-0.jsonl"
    write(path, "first")
    with path.open("ab") as file:
        file.write(line + b"\n")
    write(path, "second")
    with path.open("ab") as file:
        file.write(path.read_bytes()[:40])
    assert [span.name for span in read_spans(tmp_path)] == ["first", "second"]


def test_a_line_cut_short_by_a_crash_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.jsonl"
    path.write_bytes(b'{"trace_id": "ab", "na')
    write(path, "first", "second")
    assert [span.name for span in read_spans(tmp_path)] == ["first", "second"]


def test_no_folder_no_spans(tmp_path: Path) -> None:
    assert read_spans(tmp_path / "nowhere") == []
    assert latest_trace_id([]) is None


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    write(tmp_path / "a.jsonl", "whole")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert [span.name for span in read_spans(tmp_path)] == ["whole"]


def test_a_disk_that_refuses_costs_spans_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spans").write_text("a file where a folder should be")
    exporter = SpanFileExporter(tmp_path / "spans" / "decode-0.jsonl")
    with caplog.at_level(logging.WARNING, "twostroke"):
        assert [exporter.export([]) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
    assert len([entry for entry in caplog.records if "spans are lost" in entry.getMessage()]) == 1


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    exporter = SpanFileExporter(tmp_path / "decode-0.jsonl")
    telemetry = make_telemetry("decode", "0", (SimpleSpanProcessor(exporter),))
    threads = [
        threading.Thread(target=lambda: [telemetry.tracer.start_span("span").end() for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_spans(tmp_path)) == 200


def test_the_latest_trace_is_that_of_the_latest_request() -> None:
    spans = [
        record("aa", SPAN_REQUEST, 10),
        record("bb", SPAN_REQUEST, 20),
        record("aa", SPAN_TOKENIZE, 30),
        record("cc", SPAN_TOKENIZE, 40),
    ]
    assert latest_trace_id(spans) == "bb"
    assert latest_trace_id(spans[2:]) == "cc"
    assert [span.start_ns for span in spans_of(reversed(spans), "aa")] == [10, 30]
    assert spans_of(spans, "dd") == []


@pytest.mark.parametrize("worker_id", ["decode-0", "127.0.0.1:50051", "../../etc/passwd", "a b/c"])
def test_a_workers_file_lies_in_the_folder(tmp_path: Path, worker_id: str) -> None:
    path = span_file(tmp_path, "decode", worker_id)
    assert path.parent == spans_folder(tmp_path)
    assert path.suffix == ".jsonl"
