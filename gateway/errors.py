"""Every refusal and failure in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import math

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BadRequest, TwostrokeError
from gateway.edge import failure_headers, record_of
from gateway.wire_json import Json, to_json

DEFAULT_RETRY_AFTER_S = 1.0
_RETRYABLE = frozenset({429, 503})
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TwostrokeError, _on_twostroke_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_defect)


def error_json(error: TwostrokeError) -> Json:
    return _shape(error.message, error.openai_type, error.param, error.code)


def _shape(message: str, kind: str, param: str | None, code: str) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, content: Json, headers: dict[str, str]) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


async def _on_twostroke_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwostrokeError)
    record = record_of(request.scope)
    record.error_code = error.code
    headers = failure_headers(record)
    if error.http_status in _RETRYABLE:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return _response(error.http_status, error_json(error), headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses: an unknown path, a method, a body that is too long."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "invalid_request")
    record_of(request.scope).error_code = code
    where = f" ({request.method} {request.url.path})" if error.status_code in (404, 405) else ""
    content = _shape(f"{error.detail}{where}", BadRequest.openai_type, None, code)
    return _response(error.status_code, content, dict(error.headers or {}))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(map(str, first["loc"]))
    return await _on_twostroke_error(request, BadRequest(f"{param}: {first['msg']}", param=param))


async def _on_defect(_request: Request, _error: Exception) -> Response:
    """A mistake of ours: the client learns that, the log learns the rest (the server logs the error)."""
    content = _shape(
        "the gateway failed on this request; its log has the reason", "server_error", None, TwostrokeError.code
    )
    return _response(500, content, {})
