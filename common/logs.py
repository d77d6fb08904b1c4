"""Logs: one line a record on stderr. Prompts and tokens are never logged.

Habit: `log = logging.getLogger("twostroke.<part>")`, then `log.info("what happened", extra=fields(blocks=12))`.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOGGER_NAME = "twostroke"
_FIELDS = "twostroke_fields"


def setup_logging(service: str, level: str = "INFO") -> None:
    """Sends ours from `level` on and other libraries' warnings to stderr. Calling it again replaces the first call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(LOGGER_NAME).setLevel(level)


def fields(**values: object) -> Mapping[str, Any]:
    """Named values for a record's `extra`; they follow the message as key=value."""
    return {_FIELDS: values}


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO decode twostroke.engine message key=value`, always in one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        parts = [time, record.levelname, self._service, record.name, _one_line(record.getMessage())]
        values: Mapping[str, object] = getattr(record, _FIELDS, {})
        parts.extend(f"{key}={_value(value)}" for key, value in values.items())
        if record.exc_info:
            parts.append(f"exception={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts)


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not any(char in text for char in ' "=\\')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    """A value inside a message must not be able to forge a second record."""
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]
