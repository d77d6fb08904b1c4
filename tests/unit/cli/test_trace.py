"""Finding the trace that is asked for, among those on file."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cli import trace
from cli.errors import CommandError
from common.telemetry import names
from common.telemetry.span_file import SpanRecord, spans_folder

FIRST, SECOND = "aa" + "0" * 30, "ab" + "0" * 30


def span(trace_id: str, number: int, name: str, **attributes: str) -> SpanRecord:
    return SpanRecord(
        trace_id,
        f"{number:016x}",
        None,
        name,
        "twostroke-gateway",
        number * 10**6,
        number * 10**6 + 1,
        attributes,
        "OK",
    )


SPANS = [
    span(FIRST, 1, names.SPAN_REQUEST, **{names.ATTR_RESPONSE_ID: "cmpl-1"}),
    span(SECOND, 2, names.SPAN_REQUEST, **{names.ATTR_RESPONSE_ID: "cmpl-2"}),
    span("ff" * 16, 3, names.SPAN_PLACE),
]


@pytest.fixture
def spans_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", str(tmp_path))
    folder = spans_folder(tmp_path)
    folder.mkdir()
    (folder / "gateway.jsonl").write_text("".join(json.dumps(asdict(span)) + "\n" for span in SPANS))


@pytest.mark.parametrize(
    ("wanted", "found"), [("", SECOND), ("aa", FIRST), ("AB0", SECOND), (FIRST, FIRST), ("cmpl-1", FIRST)]
)
def test_a_trace_is_found_by_its_id_its_beginning_or_its_response(wanted: str, found: str) -> None:
    assert trace.find_trace(SPANS, wanted, Path("spans")) == found


@pytest.mark.parametrize(
    ("wanted", "reason"), [("a", "beginning of 2 traces"), ("cmpl-9", "no trace 'cmpl-9' in spans")]
)
def test_none_or_several_are_an_error_that_says_so(wanted: str, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        trace.find_trace(SPANS, wanted, Path("spans"))


@pytest.mark.usefixtures("spans_on_file")
def test_the_last_request_is_drawn_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.run(argparse.Namespace(id="", all=False)) == 0
    assert capsys.readouterr().out.startswith(f"trace {SECOND}")
    assert trace.run(argparse.Namespace(id="", all=True)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["trace", FIRST, SECOND]


def test_nothing_on_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", str(tmp_path))
    with pytest.raises(CommandError, match=r"no spans in .*; ask a local stack something first"):
        trace.run(argparse.Namespace(id="", all=False))
