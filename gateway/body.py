"""The body of a POST request as a JSON object, bounded in size, depth and numbers."""

import json
import math
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from common.errors import BadRequest, Cancelled
from gateway.quote import quote, shorten

MAX_INT_DIGITS = 20  # of 2**64 - 1


def parse_body_bytes(content: bytes) -> dict[str, Any]:
    """Raises BadRequest for what is no JSON object in UTF-8.

    Every number in the result is finite and every integer within 64 bits.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
    return parse_json_object(text)


def parse_json_object(text: str) -> dict[str, Any]:
    """Raises BadRequest saying what is wrong and where."""
    try:
        body = json.loads(
            text,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=_refuse_duplicates,
        )
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadRequest("the body's arrays or objects are nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {_JSON_NAMES[type(body)]}; an object was expected")
    return body


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises HTTPException 413 above `max_bytes`, Cancelled when the client leaves before its end."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 19 and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise Cancelled("the client went away before its request was whole") from None
    return bytes(content)


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is longer than the limit of {max_bytes} bytes")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS + 1 or not -(2**63) <= int(digits) < 2**64:
        raise BadRequest(f"the body holds the integer {shorten(digits)}, which is beyond 64 bits")
    return int(digits)


def _parse_float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise BadRequest(f"the body holds the number {shorten(literal)}, which is too large")
    return value


def _refuse_constant(literal: str) -> NoReturn:
    raise BadRequest(f"the body holds {literal}, which is no JSON number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two equal names one would be ignored, and a parameter never is."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise BadRequest(f"the body has the name {quote(name)} twice in one object", param=shorten(name))
        fields[name] = value
    return fields


_JSON_NAMES: dict[type, str] = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
