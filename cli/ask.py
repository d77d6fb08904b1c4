"""A question through the public HTTP API, as any client would ask it: chat completions, streamed."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from cli.errors import CommandError
from cli.program import program

CONNECT_TIMEOUT_S = 10.0
Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """Filled in while the text streams; whole when `finish_reason` is set."""

    response_id: str = ""
    model: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


class Endpoint:
    """A running gateway at `url` (such as http://127.0.0.1:8000). Every failure is a CommandError that names it."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        # No read time-out: a long queue is the server's to bound, and Ctrl-C is the user's.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=timeout, trust_env=False, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != httpx.codes.OK:
            raise CommandError(refusal(response.status_code, response.text))
        models: list[dict[str, Any]] = response.json()["data"]
        return str(models[0]["id"])

    async def stream(self, messages: Sequence[Message], answer: Answer, **parameters: object) -> AsyncIterator[str]:
        """Yields the answer's text as it arrives and fills `answer` in."""
        body = {
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise CommandError(refusal(response.status_code, (await response.aread()).decode()))
                async for line in response.aiter_lines():
                    if text := _take_in(line, answer):
                        yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not answer.finish_reason:
            raise CommandError(f"{self._url} ended the stream in the middle of the answer")

    def _unreachable(self, error: httpx.HTTPError) -> CommandError:
        return CommandError(f"{self._url}: {error or type(error).__name__}; is a stack running there ({program()} up)?")


def _take_in(line: str, answer: Answer) -> str:
    """One line of server-sent events into `answer`; returns the text that it adds."""
    if not line.startswith("data:"):
        return ""
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return ""
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise CommandError(f"the answer broke off: {event['error']['message']}")
    answer.response_id = event["id"]
    answer.model = event["model"]
    answer.usage = event.get("usage") or answer.usage
    text = ""
    for choice in event["choices"]:
        text += choice["delta"].get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return text


def refusal(status: int, body: str) -> str:
    """What the gateway said, for people."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.strip() or "no reason given"
    return f"the gateway answered {status}: {message}"
