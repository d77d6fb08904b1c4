"""The outermost layer of every HTTP request: its record, its observation, and the headers that all answers have."""

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BadRequest
from gateway.observe import RequestObserver
from gateway.quote import quote
from gateway.record import Choice, RequestRecord

UNMATCHED_ROUTE = "other"
CLIENT_GONE_STATUS = 499
USAGE_HEADER = "x-twostroke-usage"
FALLBACK_HEADER = "x-twostroke-fallback"
_RECORD = "twostroke_record"


class ObservedRequests:
    """ASGI middleware. An error that passes through is a defect of ours, and counted as status 500."""

    def __init__(self, app: ASGIApp, observer: RequestObserver, clock: Callable[[], float]) -> None:
        self._app = app
        self._observer = observer
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope["method"], scope["path"], self._clock())
        scope[_RECORD] = record

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).update(_common_headers(record))
            await send(message)

        with self._observer.observe(record, Headers(scope=scope)):
            is_done = False
            try:
                await self._app(scope, receive, send_observed)
                is_done = True
            finally:
                record.status = record.status if is_done else 500
                record.route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
                record.finished = self._clock()


def record_of(scope: Scope) -> RequestRecord:
    record = scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


def wants_transfer(headers: Mapping[str, str]) -> bool:
    """Whether the client asks for what moving the KV cost, in the usage. Raises BadRequest for an unknown value."""
    value = headers.get(USAGE_HEADER)
    if value not in (None, "transfer"):
        raise BadRequest(f"the header {USAGE_HEADER} is {quote(value)}; send transfer, or leave it out")
    return value is not None


def choice_headers(choice: Choice, seed: int) -> dict[str, str]:
    """Where the request went and why, of the choice that was the first to have tokens."""
    route = choice.route
    headers = {
        "x-twostroke-seed": str(seed),
        "x-twostroke-prefill-worker": route.prefill_worker,
        "x-twostroke-decode-worker": route.decode_worker,
        "x-twostroke-placement": route.reason,
        FALLBACK_HEADER: route.fallback,
    }
    return {name: header_value(value) for name, value in headers.items() if value}


def failure_headers(record: RequestRecord) -> dict[str, str]:
    """What was tried before the failure that the client is told of."""
    tried = [choice.route.fallback for choice in record.choices if choice.route.fallback]
    return {FALLBACK_HEADER: header_value(tried[0])} if tried else {}


def _common_headers(record: RequestRecord) -> Mapping[str, str]:
    headers = {
        "x-request-id": record.request_id or "",
        "x-twostroke-trace-id": record.trace_id,
        "traceresponse": record.traceresponse,
    }
    return {name: value for name, value in headers.items() if value}


def header_value(text: str) -> str:
    """Visible ASCII alone, whatever a worker calls itself."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
