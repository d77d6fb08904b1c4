"""Places a generation: what the workers hold and how busy they are, in; a choice of workers, out."""

import asyncio
from collections.abc import Mapping

from common.errors import NoWorker
from gateway.held_blocks import held_by
from gateway.journey import Journey
from gateway.placement import Demand, Placement, place
from gateway.prefix_lookup import PrefixLookup
from gateway.registry import Registry


class Placer:
    def __init__(self, registry: Registry, lookup: PrefixLookup, *, strict: bool, reconnect_wait_s: float) -> None:
        self._registry = registry
        self._lookup = lookup
        self._strict = strict
        self._reconnect_wait_s = reconnect_wait_s

    async def demand(self, journey: Journey) -> Demand:
        """What has to be placed. The first time the index says who holds what; afterwards the workers do."""
        held = await self._held_blocks(journey)
        return Demand(journey.num_tokens, journey.deployment.layout.block_size, held)

    async def place(self, journey: Journey, demand: Demand) -> Placement:
        """Waits for a decode worker to come back when this generation has lost one and there is no other."""
        wait_s = self._reconnect_wait_s if journey.lost_decode else 0.0
        try:
            async with asyncio.timeout(wait_s):
                return await self._place_when_possible(journey, demand)
        except TimeoutError:
            assert journey.last_error is not None
            raise journey.no_room or journey.last_error from None

    async def _held_blocks(self, journey: Journey) -> Mapping[str, int]:
        workers = [worker for worker in self._registry.workers() if worker.is_ready]
        if journey.attempt == 1:
            return await self._lookup.held_blocks(journey.hashes, [worker.holder for worker in workers])
        return await held_by([worker for worker in workers if journey.may_use(worker.view())], journey.hashes)

    async def _place_when_possible(self, journey: Journey, demand: Demand) -> Placement:
        while True:
            try:
                return self._place_now(journey, demand)
            except NoWorker as error:
                journey.last_error = journey.last_error or error
            await self._registry.next_change()

    def _place_now(self, journey: Journey, demand: Demand) -> Placement:
        """A prefill worker that has no room is no reason to compute the prompt elsewhere: that is overload."""
        return place(
            [view for view in self._registry.views() if journey.may_use(view)],
            demand,
            prefill_wanted=journey.wants_prefill,
            strict=self._strict or journey.no_room is not None,
            is_move=journey.is_move,
        )
