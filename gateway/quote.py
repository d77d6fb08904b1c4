"""Clients' values in error messages: short, whatever was sent."""

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 4
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 3


def quote(value: Any) -> str:
    """The value as JSON would name it where that is short, else its beginning and its end."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _REPR.repr(value)


def shorten(text: str, max_chars: int = 60) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"
