"""Log lines: one a record, whatever is in it."""

import json
import logging
import sys

import pytest

from common.logs import LineFormatter, fields, setup_logging


def line(message: str, *args: object, **values: object) -> str:
    record = logging.LogRecord("twostroke.engine", logging.INFO, "engine.py", 1, message, args, None)
    record.__dict__.update(fields(**values))
    return LineFormatter("decode").format(record)


def test_a_line_names_time_level_service_logger_message_and_values() -> None:
    parts = line("took %d blocks", 3, num_free=12, rate=0.123456789, peer="prefill-0").split(" ")
    assert parts[0].endswith("Z")
    assert parts[0][10] == "T"
    assert " ".join(parts[1:]) == (
        "INFO decode twostroke.engine took 3 blocks num_free=12 rate=0.123457 peer=prefill-0"
    )


@pytest.mark.parametrize("value", ["", "two words", 'a "quote"', "a=b", "line\nbreak", "\x1b[31mred", "back\\slash"])
def test_values_that_would_confuse_are_quoted(value: str) -> None:
    text = line("x", value=value).partition("value=")[2]
    assert json.loads(text) == value
    assert text.isprintable()


def test_a_message_cannot_forge_a_second_line() -> None:
    text = line("refused %s", "a\n2026-01-01T00:00:00.000Z ERROR decode forged")
    assert "\n" not in text
    assert "\\n2026" in text


def test_a_traceback_stays_in_the_line() -> None:
    try:
        raise ValueError("block 7")
    except ValueError:
        record = logging.LogRecord("twostroke.x", logging.ERROR, "x.py", 1, "failed", (), sys.exc_info())
    text = LineFormatter("decode").format(record)
    assert "\n" not in text
    trace = json.loads(text.partition("exception=")[2])
    assert trace.startswith("Traceback")
    assert trace.endswith("ValueError: block 7")


def test_our_own_records_show_and_other_libraries_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("twostroke")
    handlers, levels = root.handlers, (root.level, ours.level)
    try:
        setup_logging("gateway")
        setup_logging("gateway")
        logging.getLogger("twostroke.x").info("ours")
        logging.getLogger("twostroke.x").debug("too quiet")
        logging.getLogger("somebody.else").info("theirs")
        logging.getLogger("somebody.else").warning("their warning")
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
    lines = capsys.readouterr().err.splitlines()
    assert [text.split(" ", 4)[4] for text in lines] == ["ours", "their warning"]
