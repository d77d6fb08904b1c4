"""Spans in bounded local files, one JSON line a span, for machines without a collector. Writer and reader.

Each process writes `<state_dir>/spans/<service>-<worker_id>.jsonl`; at `max_bytes` the file becomes `….jsonl.1`.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.telemetry.names import SPAN_REQUEST

log = logging.getLogger("twostroke.telemetry")

SUFFIX = ".jsonl"
SERVICE_NAME = "service.name"


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span as it lies in a file. Ids are lower-case hex; times are wall-clock nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    status: str  # "UNSET", "OK" or "ERROR"


def span_file(state_dir: Path, service: str, worker_id: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{service}-{worker_id}")
    return spans_folder(state_dir) / f"{name}{SUFFIX}"


def spans_folder(state_dir: Path) -> Path:
    return state_dir / "spans"


class SpanFileExporter(SpanExporter):
    """Appends to `path`; both files together stay within about 2 * `max_bytes`. Never raises: a full disk costs spans,
    not requests, and is logged once."""

    def __init__(self, path: Path, max_bytes: int = 16 * 2**20) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._has_failed = False
        self._may_end_torn = True  # a crash or a full disk may have left half a line at the file's end

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(asdict(_record(span)), default=str) + "\n" for span in spans)
        try:
            with self._lock:
                self._append(lines.encode())
        except OSError as error:
            if not self._has_failed:
                log.warning("spans are lost: cannot write %s: %s", self._path, error)
            self._has_failed = self._may_end_torn = True
            return SpanExportResult.FAILURE
        self._has_failed = False
        return SpanExportResult.SUCCESS

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if self._may_end_torn and file.tell() > 0:
                file.write(b"\n")
            file.write(data)
            is_full = file.tell() >= self._max_bytes
        self._may_end_torn = False
        if is_full:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


def read_spans(folder: Path) -> list[SpanRecord]:
    """Every span in `folder`, by start time. Half or foreign lines are skipped; no folder, no spans."""
    records: list[SpanRecord] = []
    for path in [*folder.glob(f"*{SUFFIX}.1"), *folder.glob(f"*{SUFFIX}")]:
        if not path.is_file():
            continue  # a folder, or a pipe that nobody writes to
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue  # rotated away meanwhile
        records.extend(record for line in lines if (record := _parse(line)) is not None)
    return sorted(records, key=lambda record: (record.start_ns, record.span_id))


def latest_trace_id(spans: Iterable[SpanRecord]) -> str | None:
    """The trace of the request that started last; where no request was recorded, of the span that did."""
    ordered = sorted(spans, key=lambda span: (span.name == SPAN_REQUEST, span.start_ns))
    return ordered[-1].trace_id if ordered else None


def spans_of(spans: Iterable[SpanRecord], trace_id: str) -> list[SpanRecord]:
    """The trace's spans by start time."""
    return sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start_ns)


def _record(span: ReadableSpan) -> SpanRecord:
    assert span.context is not None
    start_ns = span.start_time or 0
    return SpanRecord(
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
        name=span.name,
        service=str(span.resource.attributes.get(SERVICE_NAME, "")),
        start_ns=start_ns,
        end_ns=span.end_time or start_ns,
        attributes=dict(span.attributes or {}),
        status=span.status.status_code.name,
    )


def _parse(line: bytes) -> SpanRecord | None:
    try:
        values = json.loads(line)
        record = SpanRecord(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (record.trace_id, record.span_id, record.name, record.service, record.status)
    times = (record.start_ns, record.end_ns)
    is_whole = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(time, int) for time in times)
        and isinstance(record.parent_id, str | None)
        and isinstance(record.attributes, dict)
    )
    return record if is_whole else None
