"""The official client against a real server on a real port, with a scripted dispatcher behind it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn
from openai import AsyncOpenAI, OpenAI

from common.errors import NoRoom, PeerLost
from common.sampling import FinishReason
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import FakeDispatcher, Script, Step, says, tokens_of
from tests.support.gateway_app import TestGateway
from tests.support.tiny_tokenizers import MODEL_NAME, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MESSAGES: Any = [{"role": "user", "content": "Say hello."}]


@asynccontextmanager
async def serving(gateway: TestGateway) -> AsyncIterator[str]:
    """The API's address. Connections wait in the listening socket until the server takes them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(gateway.app, log_config=None, lifespan="off", ws="none"))
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await serve


@asynccontextmanager
async def client_of(script: Script, **fields: Any) -> AsyncIterator[tuple[AsyncOpenAI, FakeDispatcher]]:
    gateway = TestGateway(script, **fields)
    async with (
        serving(gateway) as address,
        AsyncOpenAI(base_url=address, api_key="sk-test", max_retries=0) as client,
    ):
        yield client, gateway.dispatcher


def closed(num: int) -> Callable[[FakeDispatcher], bool]:
    return lambda dispatcher: dispatcher.num_open == 0 and len(dispatcher.closed_early) == num


async def test_models() -> None:
    async with client_of(says(TOKENIZER, "hi")) as (client, _):
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == [MODEL_NAME]
        assert (await client.models.retrieve(MODEL_NAME)).owned_by == "twostroke"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")


async def test_a_chat_whole_and_streamed() -> None:
    async with client_of(says(TOKENIZER, "Größe 水!", num_cached_tokens=3)) as (client, _):
        whole = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, seed=5, logprobs=True)
        choice = whole.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", "Größe 水!")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        assert len(choice.logprobs.content) == whole.usage.completion_tokens

        stream = await client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(deltas) == "Größe 水!"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == whole.usage


async def test_the_client_s_own_stream_helper() -> None:
    async with client_of(says(TOKENIZER, "Hello, world!")) as (client, _):
        async with client.chat.completions.stream(model=MODEL_NAME, messages=MESSAGES, n=2) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Hello, world!"] * 2
        assert [choice.finish_reason for choice in final.choices] == ["stop"] * 2


async def test_a_completion_whole_and_streamed() -> None:
    async with client_of(says(TOKENIZER, "Hello, world!")) as (client, dispatcher):
        whole = await client.completions.create(
            model=MODEL_NAME, prompt=["a", "b"], n=2, logprobs=1, max_tokens=50, extra_body={"top_k": 5}
        )
        assert [choice.text for choice in whole.choices] == ["Hello, world!"] * 4
        assert whole.choices[0].logprobs is not None
        assert dispatcher.generations[0].sampling.top_k == 5
        stream = await client.completions.create(model=MODEL_NAME, prompt=[5, 6, 7], stream=True, stop="world")
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, "


async def test_the_synchronous_client() -> None:
    gateway = TestGateway(says(TOKENIZER, "Hello, world!"))

    def ask(address: str) -> str:
        with OpenAI(base_url=address, api_key="sk-test", max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with serving(gateway) as address:
        assert await asyncio.to_thread(ask, address) == "Hello, world!"


async def test_raw_headers() -> None:
    async with client_of(says(TOKENIZER, "hi")) as (client, _):
        response = await client.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=MESSAGES, seed=9)
        assert response.headers["x-twostroke-seed"] == "9"
        assert response.headers["x-request-id"] == response.parse().id


async def test_errors_are_the_client_s_own_classes() -> None:
    async with client_of(lambda _: [NoRoom("no room", retry_after_s=1.0)]) as (client, _):
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
        assert refused.value.code == "no_room"
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=9)
        assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)


async def test_a_key_is_asked_for() -> None:
    async with client_of(says(TOKENIZER, "hi"), tenants_by_api_key={"sk-other": "acme"}) as (client, _):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        answer = await client.with_options(api_key="sk-other").chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES
        )
        assert answer.choices[0].message.content == "hi"


async def test_an_error_within_a_stream_is_raised_by_the_client() -> None:
    def breaks(_: Generation) -> list[Step]:
        return [TokenDelta(tokens_of([20])), PeerLost("decode-0 is gone")]

    async with client_of(breaks) as (client, _):
        stream = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="decode-0 is gone"):
            _ = [chunk async for chunk in stream]


def goes_on_for_ever(_: Generation) -> list[Step]:
    return [TokenDelta(tokens_of([20])), asyncio.Event(), TokenDelta((), FinishReason.LENGTH)]


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_closes_the_generations(n: int) -> None:
    async with client_of(goes_on_for_ever) as (client, dispatcher):
        stream = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True, n=n)
        async for _ in stream:
            break
        await stream.close()
        await dispatcher.until(closed(n))


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_before_the_first_token_closes_the_generation(stream: bool) -> None:
    async with client_of(lambda _: [asyncio.Event()]) as (client, dispatcher):
        asking: asyncio.Task[Any] = asyncio.create_task(
            client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=stream)  # type: ignore[call-overload]
        )
        await dispatcher.until(lambda it: it.num_open == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await dispatcher.until(closed(1))
