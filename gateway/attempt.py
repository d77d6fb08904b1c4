"""One attempt's workers, calls and claims, and their end: nothing opened here outlives `end`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from common.pb.decode_pb2 import Ticket
from gateway.generation import TokenDelta
from gateway.hand_off import HandOff
from gateway.journey import Journey
from gateway.legs import Legs
from gateway.placement import Demand, Placement, Role
from gateway.release import Releases
from gateway.worker import Claim, Worker


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens that an attempt began with, of the prompt and of the output that the client had."""

    num_reused: int
    num_computed: int


class AttemptState(Enum):
    PLACED = auto()  # workers are chosen and the work is counted; nobody was asked for anything
    RESERVING = auto()  # decode was asked for room, and may hold some
    RUNNING = auto()  # both calls are open, or decode's alone
    ENDED = auto()  # the calls are ended, and whatever the workers hold is being given back


LEGAL_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.PLACED: frozenset({AttemptState.RESERVING, AttemptState.RUNNING, AttemptState.ENDED}),
    AttemptState.RESERVING: frozenset({AttemptState.RUNNING, AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}


class Attempt:
    """Made with its placement; then `reserve`d where prefill takes part, `open`ed, read, and `end`ed in any state."""

    def __init__(
        self,
        journey: Journey,
        placement: Placement,
        workers: dict[Role, Worker],
        releases: Releases,
        legs: Legs,
        clock: Callable[[], float],
    ) -> None:
        self.placement = placement
        self.state = AttemptState.PLACED
        self._journey = journey
        self._number = journey.attempt
        self._workers = workers
        self._releases = releases
        self._legs = legs
        self._clock = clock
        generation = journey.generation
        self._hand_off = HandOff(
            legs,
            generation.times,
            generation.transfer,
            clock,
            num_delivered=len(journey.delivered),
            has_prefill=Role.PREFILL in workers,
        )
        self._holds: set[Role] = set()  # workers that may hold something
        self._claims: list[Claim] = []
        self._prompt_claim: Claim | None = None
        self._reserving: asyncio.Task[Ticket] | None = None
        self._ending: dict[Role, asyncio.Task[None]] | None = None
        self._num_tokens = journey.num_tokens
        self._is_reuse_told = False

    @property
    def is_running(self) -> bool:
        """Whether calls were opened, until `end`."""
        return self.state is AttemptState.RUNNING

    def claim(self, demand: Demand) -> None:
        """Counts the work at once, so that the next placement sees it before the workers' statuses do."""
        decode = self._workers[Role.DECODE]
        computing = self._workers.get(Role.PREFILL, decode)
        view = self.placement.prefill or self.placement.decode
        is_apart = computing is not decode
        self._prompt_claim = computing.claim(num_tokens=demand.uncached_tokens(view), num_sequences=int(is_apart))
        self._claims = [self._prompt_claim, decode.claim(num_blocks=demand.num_blocks, num_sequences=1)]

    async def reserve(self, timeout_s: float) -> Ticket:
        """Raises the decode worker's refusal or loss. A caller who is cancelled leaves the call to end by itself (see
        `Legs.close`), and `end` releases what came of it."""
        self._move_to(AttemptState.RESERVING)
        self._holds.add(Role.DECODE)
        call = self._workers[Role.DECODE].reserve(self._journey.reserve_request(), timeout_s)
        self._reserving = asyncio.create_task(call)
        return await asyncio.shield(self._reserving)

    def refused(self) -> None:
        """The worker said no: it holds nothing."""
        self._holds.discard(Role.DECODE)

    def open(self, ticket: Ticket | None) -> None:
        """Opens both calls; without a ticket decode's alone."""
        journey, decode, times = self._journey, self._workers[Role.DECODE], self._journey.generation.times
        self._move_to(AttemptState.RUNNING)
        self._holds.update(self._workers)
        times.run_started = times.run_started or self._clock()
        if ticket is not None:
            self._hand_off.kv_bytes = journey.num_missing_bytes(ticket)
            prefill = self._workers[Role.PREFILL]
            self._legs.open(prefill, prefill.open_run(journey.prefill_request(decode.address, ticket)))
        self._legs.open(decode, decode.open_generate(journey.generate_request(ticket)))

    async def next_delta(self) -> TokenDelta:
        """Raises LegFailed. With the finish reason everything is being given back already."""
        arrival = await self._hand_off.next()
        if self._prompt_claim is not None:
            self._prompt_claim.end()
        if self._journey.num_cached_tokens is None:
            self._journey.num_cached_tokens = min(self._hand_off.num_cached_tokens, self._num_prompt_tokens)
        self._journey.delivered.extend(token.token_id for token in arrival.tokens)
        if arrival.finish_reason is not None:
            self.end(finished_by=arrival.finished_by)
        return TokenDelta(arrival.tokens, arrival.finish_reason, self._journey.num_cached_tokens)

    def take_reuse(self) -> Reuse | None:
        """Once, when the first tokens are here."""
        num_reused = self._hand_off.num_reused_tokens
        if num_reused is None or self._is_reuse_told:
            return None
        self._is_reuse_told = True
        return Reuse(num_reused, self._num_tokens - num_reused)

    def take_refetched_blocks(self) -> int:
        """Blocks that came twice, told once."""
        num_blocks, self._hand_off.num_refetched_blocks = self._hand_off.num_refetched_blocks, 0
        return num_blocks

    def end(self, *, finished_by: Role | None = None) -> dict[Role, "asyncio.Task[None]"]:
        """Ends both calls and starts the release of both sides; returns at once, with the releases. Idempotent."""
        if self._ending is None:
            self._move_to(AttemptState.ENDED)
            for claim in self._claims:
                claim.end()
            readers = self._legs.close(but=finished_by)
            before: dict[Role, list[asyncio.Task[Any]]] = {role: [] for role in self._holds}
            if finished_by in readers:
                before[finished_by].append(readers[finished_by])
            if self._reserving is not None and not self._reserving.done():
                before[Role.DECODE].append(self._reserving)
            self._ending = {
                role: self._releases.start(self._journey.transfer_id, self._number, self._workers[role], before[role])
                for role in self._holds
            }
        return self._ending

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self._journey.generation.token_ids)

    def _move_to(self, state: AttemptState) -> None:
        assert state in LEGAL_TRANSITIONS[self.state], f"attempt {self._number}: {self.state.name} -> {state.name}"
        self.state = state
