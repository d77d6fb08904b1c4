"""What `run` and `demo` show of their question: the answer, and its time from the span that the gateway left."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cli.errors import CommandError
from cli.first_question import ask_first_question
from common.telemetry import names
from common.telemetry.span_file import SpanRecord, spans_folder
from tests.support.stand_in_gateway import RESPONSE_ID, stand_in_gateway


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", str(tmp_path))
    return tmp_path


def leave_span(state: Path) -> None:
    parts = dict.fromkeys(names.TTFT_PARTS, 0.01)
    attributes = {names.ATTR_RESPONSE_ID: RESPONSE_ID, names.ATTR_TTFT: 0.09, names.ATTR_TPOT: 0.002, **parts}
    span = SpanRecord("a" * 32, "b" * 16, None, names.SPAN_REQUEST, "twostroke-gateway", 1, 2, attributes, "OK")
    spans_folder(state).mkdir()
    (spans_folder(state) / "gateway.jsonl").write_text(json.dumps(asdict(span)) + "\n")


async def test_the_answer_is_shown_and_then_where_its_time_went(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_span(state)
    with stand_in_gateway("Paris", ".") as gateway:
        await ask_first_question(gateway.url)
    out = capsys.readouterr().out
    assert "Answer: Paris.\n" in out
    shown = {line.split()[0]: line.split()[1] for line in out[out.index("Where the time went") :].splitlines()[1:]}
    assert (shown["TTFT"], shown["queue"], shown["transfer"], shown["TPOT"]) == ("90.0", "10.0", "10.0", "2.0")


async def test_an_empty_answer_did_not_work(state: Path) -> None:
    with stand_in_gateway(num_tokens=0) as gateway, pytest.raises(CommandError, match="the answer is empty"):
        await ask_first_question(gateway.url)


async def test_spans_that_go_elsewhere_are_not_waited_for(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with stand_in_gateway("Paris") as gateway:
        await ask_first_question(gateway.url)
    assert "spans go to grpc (OTEL_* variables)" in capsys.readouterr().out
