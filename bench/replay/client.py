"""Issues a trace's requests as streamed completions, on time, and records what came back and when."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from bench.replay.prompts import PromptMaker
from bench.replay.record import Outcome, RequestRecord, digest_of
from bench.replay.trace import PlannedRequest, Trace

_HEADERS = {"content-type": "application/json", "x-twostroke-usage": "transfer"}
"""Other servers ignore the second."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, ready to be sent."""

    planned: PlannedRequest
    body: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class ClientSettings:
    model: str
    timeout_s: float = 600.0  # of one request, from when it is sent
    ignores_eos: bool = True  # sends `ignore_eos`, so that outputs have the planned length


class StreamBroken(Exception):
    """The answer was not a complete stream; `str` is a code for the record."""


class ReplayClient:
    """One run. The HTTP client's base URL is the server's root; it must not limit connections."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        settings: ClientSettings,
        prompts: PromptMaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._settings = settings
        self._prompts = prompts
        self._clock = clock
        self._started = clock()

    async def warm_up(self, trace: Trace, num_requests: int) -> list[RequestRecord]:
        """The shapes of the trace's first requests, one after the other, with tokens that the trace does not have."""
        prompts = replace(self._prompts, seed=self._prompts.seed + 2**32)
        shapes = [trace.requests[index % len(trace.requests)] for index in range(num_requests)]
        prepared = [self._prepare(replace(shape, cancel_after=None), prompts) for shape in shapes]
        return await self._one_client(iter(prepared))

    async def replay(self, trace: Trace) -> list[RequestRecord]:
        """In the trace's order, except that a closed loop's are grouped by client. All prompts are made beforehand."""
        prepared = [self._prepare(request, self._prompts) for request in trace.requests]
        self._started = self._clock()
        if trace.num_clients is not None:
            waiting = iter(prepared)
            loops = (self._one_client(waiting) for _ in range(trace.num_clients))
            return [record for records in await asyncio.gather(*loops) for record in records]
        return list(await asyncio.gather(*(self._arrive(request) for request in prepared)))

    def _prepare(self, request: PlannedRequest, prompts: PromptMaker) -> Prepared:
        asked: dict[str, Any] = {
            "prompt": prompts.prompt(request.segments),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            **({"ignore_eos": True} if self._settings.ignores_eos else {}),
        }
        around = {"model": self._settings.model, "stream": True, "stream_options": {"include_usage": True}}
        return Prepared(request, json.dumps(asked | around).encode(), digest_of(json.dumps(asked).encode()))

    async def _one_client(self, waiting: Iterator[Prepared]) -> list[RequestRecord]:
        return [await self._ask(prepared, self._now()) for prepared in waiting]

    async def _arrive(self, prepared: Prepared) -> RequestRecord:
        arrival_s = prepared.planned.arrival_s
        await asyncio.sleep(max(0.0, arrival_s - self._now()))
        return await self._ask(prepared, arrival_s)

    async def _ask(self, prepared: Prepared, queued_s: float) -> RequestRecord:
        request = prepared.planned
        record = RequestRecord(request.num_input_tokens, queued_s, sent_s=self._now(), request_digest=prepared.digest)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                record.outcome = await self._stream(prepared.body, record, request.cancel_after)
        except (TimeoutError, httpx.TimeoutException):
            record.outcome, record.error = Outcome.TIMED_OUT, "timed_out"
        except StreamBroken as broken:
            record.error = str(broken)
        except httpx.HTTPError as error:
            record.error = type(error).__name__
        record.ended_s = self._now()
        return record

    async def _stream(self, body: bytes, record: RequestRecord, cancel_after: int | None) -> Outcome:
        async with self._http.stream("POST", "/v1/completions", content=body, headers=_HEADERS) as response:
            record.status = response.status_code
            if response.status_code != httpx.codes.OK:
                raise StreamBroken(f"status_{response.status_code}")
            async for event in self._events(response, record):
                self._keep(record, event)
                if cancel_after is not None and len(record.event_times_s) >= cancel_after:
                    return Outcome.CANCELLED  # leaving the block closes the connection
        return Outcome.COMPLETED

    async def _events(self, response: httpx.Response, record: RequestRecord) -> AsyncIterator[dict[str, Any]]:
        """Until `[DONE]`; a stream that ends without it is broken."""
        async for line in response.aiter_lines():
            if record.first_byte_s is None:
                record.first_byte_s = self._now()
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if line.startswith("data:"):
                yield _json_object(data)
        raise StreamBroken("stream_ended_early")

    def _keep(self, record: RequestRecord, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            code = error.get("code") if isinstance(error, dict) else None
            raise StreamBroken(str(code or "stream_error"))
        choices = event.get("choices") or [{}]
        is_first_at_the_end = bool(choices[0].get("finish_reason")) and not record.event_times_s
        if choices[0].get("text") or is_first_at_the_end:  # tokens without text show at the end alone
            record.event_times_s.append(self._now())
            record.pieces.append(choices[0].get("text") or "")
        usage = event.get("usage") or {}
        if "completion_tokens" in usage:
            _keep_usage(record, usage)

    def _now(self) -> float:
        return self._clock() - self._started


def _keep_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    record.num_reported_tokens = int(usage["completion_tokens"])
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    told = usage.get("twostroke") or {}
    exposed_ms = told.get("exposed_transfer_ms")
    record.kv_bytes = told.get("kv_bytes")
    record.exposed_transfer_s = None if exposed_ms is None else exposed_ms / 1000


def _json_object(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StreamBroken("event_is_not_json") from error
    if not isinstance(event, dict):
        raise StreamBroken("event_is_not_an_object")
    return event
