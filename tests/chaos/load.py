"""Clients: many at once, streamed and not, some of which hang up; what each of them saw, in one record."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.cases import Answer, Case

CANCELLED_SHARE = 0.08
GIVE_UP_S = 180.0
"""A request that is refused is sent again, as clients do, for up to this long."""


@dataclass(frozen=True)
class Limits:
    deadline_s: float  # an answer that takes longer is past its deadline
    hang_s: float  # what has not ended by then hangs


@dataclass
class Totals:
    right: int = 0
    hung_up: int = 0  # by the client, on purpose
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    refused: Counter[str] = field(default_factory=Counter)  # and sent again
    fallbacks: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.right + self.hung_up + len(self.wrong) + len(self.hangs) + sum(self.failed.values())


class Refused(Exception):
    """Nothing was begun: the client may send it again."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Broken(Exception):
    """The answer ended early; `part` is what came of it."""

    def __init__(self, reason: str, part: Answer) -> None:
        super().__init__(reason)
        self.part = part


def _make_client(url: str, limits: Limits) -> httpx.AsyncClient:
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(base_url=url, timeout=limits.hang_s, limits=pool)


class Load:
    """`expected`: case number -> right answer."""

    def __init__(self, url: str, cases: list[Case], expected: Mapping[int, Answer], limits: Limits, seed: int) -> None:
        self.totals = Totals()
        self._client = _make_client(url, limits)
        # Cancelled requests must not share a pool with the others: what they do to it is not the gateway's doing.
        self._leaving_client = _make_client(url, limits)
        self._cases = cases
        self._expected = expected
        self._limits = limits
        self._draw = random.Random(seed)
        self._model = ""

    async def run(self, concurrency: int, goes_on: Callable[[Totals], bool]) -> None:
        """Asks until `goes_on` says no; then waits for what is open."""
        clients = [asyncio.create_task(self._client_loop(goes_on)) for _ in range(concurrency)]
        await asyncio.gather(*clients)

    async def close(self) -> None:
        await self._client.aclose()
        await self._leaving_client.aclose()

    async def _client_loop(self, goes_on: Callable[[Totals], bool]) -> None:
        while goes_on(self.totals):
            case = self._draw.choice(self._cases)
            await self._one(case, streams=self._draw.random() < 0.5, cancels=self._draw.random() < CANCELLED_SHARE)

    async def _one(self, case: Case, *, streams: bool, cancels: bool) -> None:
        totals, began_s = self.totals, time.monotonic()
        label = f"case {case.number}, {'streamed' if streams else 'whole'}"
        while True:
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(self._limits.hang_s):
                    await self._judge(case, label, streams=streams, cancels=cancels)
            except TimeoutError:
                totals.hangs.append(f"{label}: no end after {self._limits.hang_s:g} s")
            except Refused as refusal:
                totals.refused[str(refusal)] += 1
                if time.monotonic() - began_s < GIVE_UP_S:
                    await asyncio.sleep(refusal.wait_s)
                    continue
                totals.failed[f"refused for {GIVE_UP_S:g} s: {refusal}"] += 1
            took_s = time.monotonic() - started_s
            totals.durations_s.append(took_s)
            if self._limits.deadline_s < took_s < self._limits.hang_s:
                totals.late.append(f"{label}: {took_s:.1f} s")
            return

    async def _judge(self, case: Case, label: str, *, streams: bool, cancels: bool) -> None:
        expected = self._expected[case.number]
        try:
            if cancels:
                part = await self._hang_up(case, streams=streams)
                self._check_part(expected, part, label)
                self.totals.hung_up += 1
                return
            answer = await self.ask(case, streams=streams)
        except Broken as broken:
            self._check_part(expected, broken.part, label)
            self.totals.failed[str(broken)] += 1
            return
        if answer == expected:
            self.totals.right += 1
        else:
            self.totals.wrong.append(f"{label}: {answer} instead of {expected}")

    def _check_part(self, expected: Answer, part: Answer, label: str) -> None:
        if not expected.begins_with(part):
            self.totals.wrong.append(f"{label}, cut off: {part} instead of the beginning of {expected}")

    async def ask(self, case: Case, *, streams: bool) -> Answer:
        """Raises Refused or Broken."""
        seen = _Seen()
        try:
            if streams:
                await self._stream(self._client, case, seen)
            else:
                await self._whole(self._client, case, seen)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise Refused("gateway down", 0.1) from None
        except httpx.TransportError as error:
            raise Broken(f"connection to the gateway lost ({type(error).__name__})", seen.answer()) from None
        return seen.answer()

    async def _hang_up(self, case: Case, *, streams: bool) -> Answer:
        """A client that leaves: at some moment, or with some chunk."""
        seen = _Seen(max_chunks=self._draw.choice((0, 1, 3)) if streams else None)
        patience_s = self._draw.choice((0.0, 0.01, 0.05, 0.2, 1.0))
        try:
            async with asyncio.timeout(patience_s):
                await (self._stream if streams else self._whole)(self._leaving_client, case, seen)
        except (TimeoutError, httpx.TransportError, Refused):
            pass
        return seen.answer()

    async def _body(self, case: Case, *, stream: bool) -> dict[str, Any]:
        if not self._model:
            self._model = (await self._client.get("/v1/models")).json()["data"][0]["id"]
        return {**case.body, "model": self._model, "stream": stream}

    async def _whole(self, client: httpx.AsyncClient, case: Case, seen: "_Seen") -> None:
        response = await client.post("/v1/completions", json=await self._body(case, stream=False))
        self._check_status(response, response.content, seen)
        seen.take(response.json())

    async def _stream(self, client: httpx.AsyncClient, case: Case, seen: "_Seen") -> None:
        body = await self._body(case, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self._check_status(response, await response.aread() if response.status_code != 200 else b"", seen)
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    seen.is_done = True
                    continue
                seen.take(json.loads(line[6:]))
                if seen.has_enough:
                    return
        if not seen.is_done:
            raise Broken("the stream ended without [DONE]", seen.answer())

    def _check_status(self, response: httpx.Response, content: bytes, seen: "_Seen") -> None:
        for reason in response.headers.get("x-twostroke-fallback", "").split(","):
            self.totals.fallbacks[reason or "none"] += 1
        if response.status_code == 200:
            return
        code = json.loads(content)["error"]["code"]
        if response.status_code in (429, 503):
            raise Refused(f"{response.status_code} {code}", min(1.0, float(response.headers.get("retry-after", "1"))))
        raise Broken(f"{response.status_code} {code}", seen.answer())


class _Seen:
    """What came of an answer until now."""

    def __init__(self, max_chunks: int | None = None) -> None:
        self.is_done = False
        self._max_chunks = max_chunks
        self._num_chunks = 0
        self._texts: list[str] = []
        self._tokens: list[str] = []
        self._finish_reason: str | None = None

    @property
    def has_enough(self) -> bool:
        return self._max_chunks is not None and self._num_chunks >= self._max_chunks

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise Broken(f"error event {event['error']['code']}", self.answer())
        self._num_chunks += 1
        for choice in event["choices"]:
            self._texts.append(choice["text"])
            self._tokens += (choice["logprobs"] or {}).get("tokens", [])
            self._finish_reason = choice["finish_reason"] or self._finish_reason

    def answer(self) -> Answer:
        return Answer("".join(self._texts), self._finish_reason, tuple(self._tokens))
