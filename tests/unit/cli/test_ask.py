"""Reading a streamed answer, and what each way of failing says."""

import json
from collections.abc import Callable

import httpx
import pytest

from cli.ask import Answer, Endpoint
from cli.errors import CommandError

URL = "http://127.0.0.1:8000"


def chunk(text: str | None = None, finish_reason: str | None = None, usage: dict[str, int] | None = None) -> str:
    choices = (
        [] if usage else [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}]
    )
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'model': 'small', 'choices': choices, 'usage': usage})}\n\n"


def endpoint(answer_with: Callable[[httpx.Request], httpx.Response]) -> Endpoint:
    return Endpoint(URL, httpx.MockTransport(answer_with))


def streaming(*events: str) -> Endpoint:
    return endpoint(lambda request: httpx.Response(200, text="".join(events)))


async def read(opened: Endpoint, answer: Answer) -> list[str]:
    async with opened:
        return [text async for text in opened.stream([{"role": "user", "content": "Hi"}], answer, model="small")]


async def test_a_stream_gives_text_as_it_comes_and_then_what_is_known_of_it() -> None:
    answer = Answer()
    opened = streaming(
        ": a comment\n\n",
        chunk("Hel"),
        chunk("lo"),
        chunk(None, "stop"),
        chunk(usage={"completion_tokens": 2}),
        "data: [DONE]\n\n",
    )
    assert await read(opened, answer) == ["Hel", "lo"]
    assert answer == Answer("chatcmpl-1", "small", "stop", {"completion_tokens": 2})


async def test_the_question_is_asked_as_a_stream_with_usage() -> None:
    bodies = []

    def answer_with(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text=chunk("x", "stop"))

    await read(endpoint(answer_with), Answer())
    assert bodies == [
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "model": "small",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_refusal_says_what_the_gateway_said() -> None:
    body = {"error": {"message": "model 'small' is not served here", "type": "invalid_request_error"}}
    with pytest.raises(CommandError, match="answered 404: model 'small' is not served here"):
        await read(endpoint(lambda request: httpx.Response(404, json=body)), Answer())


async def test_a_refusal_by_something_else_shows_its_text() -> None:
    with pytest.raises(CommandError, match="answered 502: Bad Gateway"):
        await read(endpoint(lambda request: httpx.Response(502, text="Bad Gateway")), Answer())


async def test_an_error_inside_the_stream_is_an_error() -> None:
    error = f"data: {json.dumps({'error': {'message': 'decode-0 is gone'}})}\n\n"
    with pytest.raises(CommandError, match="broke off: decode-0 is gone"):
        await read(streaming(chunk("Hel"), error), Answer())


async def test_a_stream_without_its_end_is_an_error() -> None:
    with pytest.raises(CommandError, match="in the middle of the answer"):
        await read(streaming(chunk("Hel")), Answer())


async def test_nobody_there_names_the_url_and_what_to_do() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(CommandError, match=rf"{URL}: connection refused; is a stack running there"):
        await read(endpoint(refuse), Answer())


async def test_the_model_is_the_one_that_is_served() -> None:
    models = {"object": "list", "data": [{"id": "small", "object": "model"}]}
    async with endpoint(lambda request: httpx.Response(200, json=models)) as opened:
        assert await opened.model() == "small"
