"""Carries out one planned request and answers it, streamed or whole. A client that leaves ends all of it at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import Cancelled, TwostrokeError
from gateway.choice_text import Piece, join_pieces
from gateway.choices import ChoiceRunner
from gateway.edge import CLIENT_GONE_STATUS, choice_headers
from gateway.record import Choice, RequestRecord, Usage
from gateway.response_format import Envelope, ResponseFormat, body_json
from gateway.sse import EventStream
from gateway.wire_json import Json, to_json


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Everything that is decided before the first token is asked for."""

    record: RequestRecord
    choices: Sequence[Choice]
    runner: ChoiceRunner
    envelope: Envelope
    answer: ResponseFormat
    clock: Callable[[], float]
    include_usage: bool
    tells_transfer: bool  # in the usage, where there is one

    def usage_json(self) -> Json:
        return Usage.of(self.choices).to_json(with_transfer=self.tells_transfer)


class GenerationResponse(Response):
    """Runs the request while it answers. Errors before the first token are raised: they become an HTTP status."""

    def __init__(self, planned: PlannedRequest) -> None:
        super().__init__()
        self._planned = planned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._planned.record
        answering = self._stream(send) if record.is_streamed else self._send_whole(scope, receive, send)
        if not await run_until_disconnect(receive, answering):
            record.status = CLIENT_GONE_STATUS
            record.error_code = Cancelled.code

    async def _stream(self, send: Send) -> None:
        planned = self._planned
        usage = planned.usage_json if planned.include_usage else None
        stream = EventStream(send, planned.envelope, planned.answer, planned.clock, usage)
        try:
            await planned.runner.run(planned.choices, stream.write)
        except TwostrokeError as error:
            if not stream.is_started:
                raise
            planned.record.status, planned.record.error_code = error.http_status, error.code
            await stream.fail(error)
        else:
            await stream.finish(planned.choices)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        planned = self._planned
        pieces: list[list[Piece]] = [[] for _ in planned.choices]

        async def keep(choice: Choice, piece: Piece) -> None:
            pieces[choice.index].append(piece)

        await planned.runner.run(planned.choices, keep)
        body = body_json(planned.envelope, planned.answer, [*map(join_pieces, pieces)], planned.usage_json())
        headers = choice_headers(planned.choices[0], planned.envelope.seed)
        await Response(to_json(body), headers=headers, media_type="application/json")(scope, receive, send)
        sent = planned.clock()
        for choice in planned.choices:
            choice.generation.times.first_byte = choice.generation.times.last_byte = sent


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ran to its end; it is cancelled, and has cleaned up, when the client leaves first.

    Precondition: the request's body was read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
