"""A streamed answer: server-sent events, one `data:` line each, `data: [DONE]` after a complete answer alone."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Send

from common.errors import TwostrokeError
from gateway.choice_text import Piece
from gateway.edge import FALLBACK_HEADER, choice_headers, header_value
from gateway.errors import error_json
from gateway.record import Choice
from gateway.response_format import Envelope, ResponseFormat
from gateway.wire_json import Json, to_json

DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies pass events on at once
}


def to_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream:
    """Writes the pieces of all choices into one response. The status goes out with the first piece."""

    def __init__(
        self,
        send: Send,
        envelope: Envelope,
        answer: ResponseFormat,
        clock: Callable[[], float],
        usage: Callable[[], Json] | None,
    ) -> None:
        """`usage` is asked at the end of a complete answer; None: the client wants none."""
        self.is_started = False
        self._send = send
        self._envelope = envelope
        self._answer = answer
        self._clock = clock
        self._usage = usage
        self._opened: set[int] = set()
        self._told_fallbacks: dict[int, str] = {}  # by choice
        self._sending = asyncio.Lock()  # choices run side by side; each piece goes out whole

    async def write(self, choice: Choice, piece: Piece) -> None:
        async with self._sending:
            if not self.is_started:
                await self._start(choice)
            events = self._fallback_note(choice) + self._events(choice.index, piece)
            if events:
                await self._send({"type": "http.response.body", "body": events, "more_body": True})
            times = choice.generation.times
            if piece.is_visible and not times.first_byte:
                times.first_byte = self._clock()

    async def finish(self, choices: Sequence[Choice]) -> None:
        """Ends a complete answer."""
        events = b""
        if self._usage is not None:
            chunk = self._envelope.wrap(self._answer.chunk_kind, [])
            events = to_event(to_json(chunk | {"usage": self._usage()}))
        await self._end(events + DONE)
        for choice in choices:
            choice.generation.times.last_byte = self._clock()

    async def fail(self, error: TwostrokeError) -> None:
        """Ends an answer that cannot be completed: an error event, and no [DONE]."""
        await self._end(to_event(to_json(error_json(error))))

    async def _start(self, choice: Choice) -> None:
        self.is_started = True
        self._told_fallbacks[choice.index] = header_value(choice.route.fallback)
        headers = _HEADERS | choice_headers(choice, self._envelope.seed)
        raw_headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw_headers})

    def _fallback_note(self, choice: Choice) -> bytes:
        """What happened after the head was sent, as a comment: clients that know nothing of it pass it over."""
        fallback = header_value(choice.route.fallback)
        if fallback == self._told_fallbacks.get(choice.index, ""):
            return b""
        self._told_fallbacks[choice.index] = fallback
        return f": {FALLBACK_HEADER}: {fallback}; choice={choice.index}\n\n".encode("ascii")

    async def _end(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _events(self, index: int, piece: Piece) -> bytes:
        events = b""
        if index not in self._opened:
            self._opened.add(index)
            opening = self._answer.opening(index)
            events += self._chunk(opening) if opening else b""
        if piece.is_visible:
            events += self._chunk(self._answer.part(index, piece))
        return events

    def _chunk(self, choice: Json) -> bytes:
        chunk = self._envelope.wrap(self._answer.chunk_kind, [choice])
        return to_event(to_json(chunk | {"usage": None} if self._usage is not None else chunk))
