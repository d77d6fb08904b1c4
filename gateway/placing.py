"""Places a generation: what the workers hold and how busy they are, in; a choice of workers, out."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from common.errors import NoWorker
from gateway.held_blocks import held_by
from gateway.journey import Journey
from gateway.placement import Demand, Fallback, Placement, Role, place
from gateway.prefix_lookup import PrefixLookup
from gateway.registry import Registry


class Placer:
    def __init__(self, registry: Registry, lookup: PrefixLookup, *, strict: bool, clock: Callable[[], float]) -> None:
        """`clock`: as of `Journey.wait_until_s`."""
        self._registry = registry
        self._lookup = lookup
        self._strict = strict
        self._clock = clock

    async def demand(self, journey: Journey) -> Demand:
        """What has to be placed. The first time the index says who holds what; afterwards the workers do."""
        held = await self._held_blocks(journey)
        return Demand(journey.num_tokens, journey.deployment.layout.block_size, held)

    async def place(self, journey: Journey, demand: Demand) -> Placement:
        """After a failure waits for workers that may serve, come back or have room; raises the last refusal or error
        when none did until `journey.wait_until_s`."""
        try:
            async with asyncio.timeout(max(0.0, journey.wait_until_s - self._clock())):
                return await self._place_when_possible(journey, demand)
        except TimeoutError:
            assert journey.last_error is not None
            raise journey.no_room or journey.last_error from None

    async def _held_blocks(self, journey: Journey) -> Mapping[str, int]:
        workers = [worker for worker in self._registry.workers() if worker.is_ready]
        if journey.attempt == 1:
            return await self._lookup.held_blocks(journey.hashes, [worker.holder for worker in workers])
        now_s = self._clock()
        return await held_by(
            [worker for worker in workers if journey.avoided.may_use(worker.view(), now_s)], journey.hashes
        )

    async def _place_when_possible(self, journey: Journey, demand: Demand) -> Placement:
        while True:
            try:
                return self._place_now(journey, demand)
            except NoWorker as error:
                journey.last_error = journey.last_error or error
            await self._next_chance(journey)

    async def _next_chance(self, journey: Journey) -> None:
        now_s = self._clock()
        again_s = journey.avoided.next_pause_end_s(now_s)
        try:
            async with asyncio.timeout(None if again_s is None else again_s - now_s):
                await self._registry.next_change()
        except TimeoutError:
            pass

    def _place_now(self, journey: Journey, demand: Demand) -> Placement:
        """A prefill worker that has no room is no reason to compute the prompt elsewhere: that is overload. Where every
        decode worker has failed this generation, one of them computes it alone: a hand-off is one more way to fail."""
        views, now_s, avoided = self._registry.views(), self._clock(), journey.avoided
        strict = self._strict or journey.no_room is not None
        prefill = avoided.usable((view for view in views if view.role is Role.PREFILL), now_s)
        decode = avoided.usable((view for view in views if view.role is Role.DECODE), now_s)
        is_last_resort = bool(decode) and decode[0] in avoided and not strict
        placement = place(
            [*(view for view in prefill if strict or view not in avoided), *decode],
            demand,
            prefill_wanted=journey.wants_prefill and not is_last_resort,
            strict=strict,
            is_move=journey.is_move,
        )
        gives_up_prefill = is_last_resort and journey.wants_prefill
        return replace(placement, fallback=Fallback.DECODE_LOST) if gives_up_prefill else placement
