"""What a request says about failures: in its body, or in headers where a client can add no field to the body."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from common.errors import BadRequest
from gateway.generation import OnFailure
from gateway.quote import quote
from gateway.schemas import GenerationBody

T = TypeVar("T", str, int)

ON_FAILURE_HEADER = "x-twostroke-on-failure"
MAX_RETRIES_HEADER = "x-twostroke-max-retries"


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """None: as the gateway is configured."""

    on_failure: OnFailure | None = None
    max_retries: int | None = None


def failure_options(headers: Mapping[str, str], body: GenerationBody, retry_limit: int) -> FailureOptions:
    """Raises BadRequest, naming the value, where one is wrong, above the gateway's limit, or said twice differently."""
    on_failure = _same(ON_FAILURE_HEADER, _on_failure(headers), "on_failure", body.on_failure)
    max_retries = _same(MAX_RETRIES_HEADER, _max_retries(headers), "max_retries", body.max_retries)
    if max_retries is not None and max_retries > retry_limit:
        raise BadRequest(f"max_retries is {max_retries}; this gateway allows {retry_limit}", param="max_retries")
    return FailureOptions(None if on_failure is None else OnFailure(on_failure), max_retries)


def _on_failure(headers: Mapping[str, str]) -> str | None:
    value = headers.get(ON_FAILURE_HEADER)
    if value is not None and value not in set(OnFailure):
        raise BadRequest(
            f"{ON_FAILURE_HEADER} is {quote(value)}; allowed: {', '.join(OnFailure)}", param=ON_FAILURE_HEADER
        )
    return value


def _max_retries(headers: Mapping[str, str]) -> int | None:
    value = headers.get(MAX_RETRIES_HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise BadRequest(
            f"{MAX_RETRIES_HEADER} is {quote(value)}; it must be a whole number, 0 or more", param=MAX_RETRIES_HEADER
        )
    return int(value)


def _same(header: str, in_header: T | None, field: str, in_body: T | None) -> T | None:
    if in_header is not None and in_body is not None and in_header != in_body:
        raise BadRequest(
            f"{field} is {in_body!r} in the body and {in_header!r} in {header}; they mean the same: send one",
            param=field,
        )
    return in_body if in_header is None else in_header
