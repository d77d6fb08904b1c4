"""`twostroke chat`: a conversation in the terminal with a running endpoint."""

import argparse
import asyncio
import sys

from cli.ask import Answer, Endpoint, Message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the gateway listens")
    parser.add_argument("--system", default="", help="a system message before the conversation")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=512, help="at most so many tokens an answer")
    parser.add_argument("--seed", type=int, default=None, help="the same seed and words give the same answers")


def run(arguments: argparse.Namespace) -> int:
    parameters: dict[str, object] = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    if arguments.seed is not None:
        parameters["seed"] = arguments.seed
    model = asyncio.run(_model(arguments.url))
    print(f"{model} at {arguments.url}. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    messages: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while (question := _read_question()) is not None:
        if question:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _answer(arguments.url, model, messages, parameters)})
    return 0


def _read_question() -> str | None:
    """None at the end of the conversation."""
    try:
        return input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(url: str, model: str, messages: list[Message], parameters: dict[str, object]) -> str:
    pieces: list[str] = []
    try:
        asyncio.run(_stream(url, pieces, messages, {"model": model, **parameters}))
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    print()
    return "".join(pieces)


async def _model(url: str) -> str:
    async with Endpoint(url) as endpoint:
        return await endpoint.model()


async def _stream(url: str, pieces: list[str], messages: list[Message], parameters: dict[str, object]) -> None:
    async with Endpoint(url) as endpoint:
        async for text in endpoint.stream(messages, Answer(), **parameters):
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
