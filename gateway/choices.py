"""Runs the choices of a request side by side: tokens in, pieces of text out, and everything closed at every end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from common.errors import PeerLost
from common.sampling import FinishReason
from gateway.choice_text import ChoiceText, Piece
from gateway.generation import Dispatcher, TokenDelta
from gateway.record import Choice

Emit = Callable[[Choice, Piece], Awaitable[None]]
"""Takes one choice's next piece. The first one comes with the first tokens, even when no text is ready yet."""


class ChoiceRunner:
    """What the choices of one request share."""

    def __init__(self, dispatcher: Dispatcher, make_text: Callable[[], ChoiceText], clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._make_text = make_text
        self._clock = clock

    async def run(self, choices: Sequence[Choice], emit: Emit) -> None:
        """Returns when all have finished. The first error ends the others and is raised."""
        if len(choices) == 1:
            await self._run_one(choices[0], emit)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._run_one(choice, emit))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _run_one(self, choice: Choice, emit: Emit) -> None:
        text = self._make_text()
        async with aclosing(self._dispatcher.generate(choice.generation, choice.route)) as deltas:
            async for delta in deltas:
                assert choice.finish_reason is None, "tokens after the finish reason"
                choice.finish_reason = self._read(choice, delta, text)
                await emit(choice, text.take(choice.finish_reason))
                if text.is_stopped:
                    return  # closing the generator ends it on both sides
        if choice.finish_reason is None:
            raise PeerLost("the stream of tokens ended without a finish reason; send the request again")

    def _read(self, choice: Choice, delta: TokenDelta, text: ChoiceText) -> FinishReason | None:
        """Counts tokens up to the one that completes a stop string; those behind it were never delivered."""
        choice.last_token = self._clock()
        choice.num_cached_tokens = delta.num_cached_tokens
        for token in delta.tokens:
            choice.num_output_tokens += 1
            text.push(token)
            if text.is_stopped:
                break
        if delta.finish_reason is not None:
            text.finish()
        return FinishReason.STOP if text.is_stopped else delta.finish_reason
