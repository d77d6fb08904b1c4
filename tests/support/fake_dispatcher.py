"""A dispatcher that follows a script: the HTTP surface's other half, for tests of the surface alone."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from common.errors import TwostrokeError
from common.sampling import FinishReason, OutputToken
from common.tokenizer import Tokenizer
from gateway.generation import Generation, Route, TokenDelta

Step = TokenDelta | TwostrokeError | asyncio.Event
"""Yield this; raise this; wait for this."""
Script = Callable[[Generation], Sequence[Step]]


class FakeDispatcher:
    """Keeps what the seam promises: times and route before the first delta, a clean end however it is closed."""

    def __init__(self, script: Script, clock: Callable[[], float] = time.monotonic) -> None:
        self.script = script
        self.clock = clock
        self.generations: list[Generation] = []
        self.closed_early: list[str] = []  # request ids of generations that did not run to their end
        self.num_open = 0
        self.route = Route("prefill-0", "decode-0", "least_load", "")
        self.changed = asyncio.Event()  # set at every start and end of a generation

    def generate(self, generation: Generation, route: Route) -> AsyncGenerator[TokenDelta, None]:
        self.generations.append(generation)
        return self._run(generation, route)

    async def _run(self, generation: Generation, route: Route) -> AsyncGenerator[TokenDelta, None]:
        self.num_open += 1
        is_finished = False
        generation.times.dispatched = self.clock()
        generation.times.run_started = self.clock()
        self.changed.set()
        try:
            for step in self.script(generation):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                if isinstance(step, TwostrokeError):
                    raise step
                self._fill_in(generation, route)
                yield step
            is_finished = True
        finally:
            self.num_open -= 1
            if not is_finished:
                self.closed_early.append(generation.request_id)
            self.changed.set()

    async def until(self, holds: Callable[["FakeDispatcher"], bool]) -> None:
        """Waits for a condition on this dispatcher. Within its event loop."""
        while not holds(self):
            self.changed.clear()
            await self.changed.wait()

    def _fill_in(self, generation: Generation, route: Route) -> None:
        route.prefill_worker = self.route.prefill_worker
        route.decode_worker = self.route.decode_worker
        route.reason = self.route.reason
        route.fallback = self.route.fallback
        if not generation.times.first_token:
            generation.times.first_token = self.clock()


def tokens_of(token_ids: Sequence[int], num_logprobs: int | None = None) -> tuple[OutputToken, ...]:
    """With made-up log probabilities where they are asked for: the chosen token, then its neighbours."""
    return tuple(_token(token_id, position, num_logprobs) for position, token_id in enumerate(token_ids))


def _token(token_id: int, position: int, num_logprobs: int | None) -> OutputToken:
    if num_logprobs is None:
        return OutputToken(token_id)
    logprob = -0.25 - position
    top = [(token_id if rank == 0 else rank + 10, logprob - rank) for rank in range(num_logprobs)]
    return OutputToken(token_id, logprob, tuple(top))


def says(
    tokenizer: Tokenizer,
    text: str,
    *,
    sizes: Sequence[int] = (1,),
    num_cached_tokens: int = 0,
    ends_with: FinishReason = FinishReason.STOP,
) -> Script:
    """Answers `text`, cut at max_tokens, in deltas of the given sizes (repeated); `stop` comes with the EOS token."""

    def script(generation: Generation) -> list[TokenDelta]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        reason = ends_with
        if reason is FinishReason.STOP:
            token_ids.append(min(tokenizer.meta.eos_token_ids))
        if len(token_ids) > generation.sampling.max_tokens:
            token_ids, reason = token_ids[: generation.sampling.max_tokens], FinishReason.LENGTH
        groups = list(_groups(tokens_of(token_ids, generation.sampling.num_logprobs), sizes))
        return [
            TokenDelta(group, reason if index == len(groups) else None, num_cached_tokens)
            for index, group in enumerate(groups, start=1)
        ]

    return script


def _groups(tokens: Sequence[OutputToken], sizes: Sequence[int]) -> Iterator[tuple[OutputToken, ...]]:
    start = 0
    while start < len(tokens):
        for size in sizes:
            if start < len(tokens):
                yield tuple(tokens[start : start + size])
                start += size
