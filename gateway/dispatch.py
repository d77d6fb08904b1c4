"""Carries a generation from placement to its last token, over as many attempts as failures allow.

    place ─► reserve ─► both calls ─► first token ─► tokens ... finish ─► release
      ▲                      │
      └── recover: another worker, or decode alone after the tokens that the client has

Implements `generation.Dispatcher`. The same request with the same seed has the same tokens on every way through here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from opentelemetry import trace

from common.errors import NoRoom, NoWorker, PeerLost, TwostrokeError
from common.kv.block_hash import tenant_salt
from common.logs import fields
from common.pb.decode_pb2 import Ticket
from common.telemetry import names
from gateway.admission import Admission
from gateway.attempt import Attempt
from gateway.generation import Generation, OnFailure, Route, TokenDelta
from gateway.hand_off import LegFailed
from gateway.journey import Journey
from gateway.legs import Legs
from gateway.metrics import DispatchMetrics
from gateway.placement import Fallback, Placement, Role
from gateway.placing import Placer
from gateway.prefill_turns import PrefillTurns
from gateway.prefix_lookup import PrefixLookup
from gateway.recovery import Failure, NextStep, Recovery, recover
from gateway.registry import Registry
from gateway.release import RELEASE_TIMEOUT_S, Releases
from gateway.retry_budget import RetryBudget

log = logging.getLogger("twostroke.dispatch")

RESERVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    has_prefill: bool  # prefill workers are configured
    strict: bool = False
    max_retries: int = 2
    progress_timeout_s: float = 60.0
    reconnect_wait_s: float = 30.0
    prefill_window_tokens: int = 4096  # as in PrefillTurns
    on_failure: OnFailure = OnFailure.RETRY_OTHER  # of requests that do not say
    retry_ratio: float = 1.0  # as in RetryBudget
    retry_reserve: int = 256


class HandOffDispatcher:
    def __init__(
        self,
        registry: Registry,
        lookup: PrefixLookup,
        admission: Admission,
        policy: DispatchPolicy,
        server_secret: bytes,
        metrics: DispatchMetrics,
        tracer: trace.Tracer,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic, in seconds; every time of a generation is read from it."""
        self._registry = registry
        self._placer = Placer(registry, lookup, strict=policy.strict, clock=clock)
        self._turns = PrefillTurns(registry, policy.prefill_window_tokens, metrics.waiting)
        self._admission = admission
        self._policy = policy
        self._server_secret = server_secret
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock
        self._releases = Releases(metrics.freed)
        self._retries = RetryBudget(policy.retry_ratio, policy.retry_reserve)

    async def generate(self, generation: Generation, route: Route) -> AsyncGenerator[TokenDelta, None]:
        generation.times.dispatched = self._clock()
        with self._admission.admit():
            journey = self._begin(generation, route)
            self._retries.earn()
            while True:
                attempt: Attempt | None = None
                try:
                    attempt = await self._make_attempt(journey)
                    await self._open(journey, attempt)
                    while True:
                        delta = await attempt.next_delta()
                        self._note_report(journey, attempt)
                        yield delta
                        if delta.finish_reason is not None:
                            return
                except LegFailed as failure:
                    assert attempt is not None
                    await self._recover(journey, attempt, failure)
                finally:
                    if attempt is not None:
                        attempt.end()

    async def settled(self) -> None:
        """Returns when every release that was begun has been answered or given up."""
        await self._releases.settled()

    def _begin(self, generation: Generation, route: Route) -> Journey:
        deployment = self._registry.deployment
        if deployment is None:
            raise NoWorker("no decode worker has answered yet; retry in a moment", retry_after_s=1.0)
        return Journey(
            generation,
            route,
            deployment,
            tenant_salt(self._server_secret, generation.tenant),
            wants_prefill=self._policy.has_prefill,
            retries_left=self._policy.max_retries if generation.max_retries is None else generation.max_retries,
            on_failure=generation.on_failure or self._policy.on_failure,
        )

    async def _make_attempt(self, journey: Journey) -> Attempt:
        journey.begin_attempt()
        if not journey.wants_prefill or journey.attempt > 1:
            return await self._place(journey)
        async with self._turns.turn():
            return await self._place(journey)

    async def _place(self, journey: Journey) -> Attempt:
        started_s = self._clock()
        with self._tracer.start_as_current_span(names.SPAN_PLACE) as span:
            demand = await self._placer.demand(journey)
            placement = await self._placer.place(journey, demand)
            span.set_attributes(
                {
                    names.ATTR_PREFILL_WORKER: placement.prefill.worker_id if placement.prefill else "",
                    names.ATTR_DECODE_WORKER: placement.decode.worker_id,
                    names.ATTR_PLACEMENT_REASON: placement.reason,
                    names.ATTR_FALLBACK: placement.fallback or "",
                }
            )
        self._note_placement(journey, placement)
        views = {Role.PREFILL: placement.prefill, Role.DECODE: placement.decode}
        workers = {role: self._registry.worker(view) for role, view in views.items() if view}
        legs = Legs(self._clock, self._policy.progress_timeout_s)
        attempt = Attempt(journey, placement, workers, self._releases, legs, self._clock)
        attempt.claim(demand)
        self._add_time(journey, "place_s", started_s)
        return attempt

    def _note_placement(self, journey: Journey, placement: Placement) -> None:
        route = journey.route
        route.prefill_worker = placement.prefill.worker_id if placement.prefill else ""
        route.decode_worker = placement.decode.worker_id
        route.reason = placement.reason
        self._metrics.placed(placement.reason)
        if placement.fallback is not None:
            self._note_fallback(journey, placement.fallback)
        elif journey.is_move:
            self._note_fallback(journey, Fallback.DECODE_RETRIED if placement.prefill else Fallback.DECODE_LOST)
        journey.is_move = False

    async def _open(self, journey: Journey, attempt: Attempt) -> None:
        """Raises LegFailed when the decode worker refuses or is lost."""
        ticket = await self._reserve(journey, attempt) if attempt.placement.prefill else None
        attempt.open(ticket)

    async def _reserve(self, journey: Journey, attempt: Attempt) -> Ticket:
        started_s = self._clock()
        with self._tracer.start_as_current_span(names.SPAN_RESERVE, record_exception=False) as span:
            try:
                ticket = await attempt.reserve(RESERVE_TIMEOUT_S)
            except TwostrokeError as error:
                if not isinstance(error, PeerLost):
                    attempt.refused()
                span.set_status(trace.StatusCode.ERROR, error.code)
                raise LegFailed(Role.DECODE, error) from None
            finally:
                self._add_time(journey, "reserve_s", started_s)
            span.set_attribute(names.ATTR_NUM_HELD_BLOCKS, ticket.num_held_blocks)
        return ticket

    def _add_time(self, journey: Journey, part: str, started_s: float) -> None:
        """Once a call is open, what a later attempt takes is part of the wait for the first token."""
        times = journey.generation.times
        if not times.run_started:
            setattr(times, part, getattr(times, part) + self._clock() - started_s)

    async def _recover(self, journey: Journey, attempt: Attempt, failed: LegFailed) -> None:
        """Prepares the next attempt, or raises what the client hears."""
        failure = self._facts(journey, attempt, failed)
        self._avoid(journey, attempt, failure)
        failure = replace(failure, other_prefill=self._has_other_prefill(journey))
        recovery = recover(failure)
        if recovery.step is not NextStep.GIVE_UP and not failure.is_refusal and not self._retries.spend():
            log.error("the retries of all generations are used up (retry_ratio, retry_reserve)")
            recovery = Recovery(NextStep.GIVE_UP)
        log.warning(
            "%s: %s failed (%s); next: %s",
            journey.generation.request_id,
            failure.role,
            failure.error.message,
            recovery.step,
            extra=fields(attempt=journey.attempt, num_delivered=len(journey.delivered)),
        )
        if recovery.step is NextStep.GIVE_UP:
            self._metrics.gave_up(failure.error, journey.on_failure)
            raise failure.error from None
        self._note_failure(journey, failure)
        if recovery.fallback is not None:
            self._note_fallback(journey, recovery.fallback)
        journey.wants_prefill &= recovery.step is not NextStep.RECOMPUTE
        journey.is_move = recovery.step is NextStep.MOVE
        await self._given_back(journey, attempt, failure)

    def _facts(self, journey: Journey, attempt: Attempt, failed: LegFailed) -> Failure:
        return Failure(
            role=failed.role,
            error=failed.error,
            is_running=attempt.is_running,
            had_prefill=attempt.placement.prefill is not None,
            has_tokens=bool(journey.delivered),
            prefill_retried=journey.prefill_retried,
            other_prefill=False,
            retries_left=journey.retries_left,
            strict=self._policy.strict,
            on_failure=journey.on_failure,
        )

    def _avoid(self, journey: Journey, attempt: Attempt, failure: Failure) -> None:
        """A decode worker that refuses a reservation mid-stream is not avoided: it may still queue the request."""
        if failure.blames_prefill:
            assert attempt.placement.prefill is not None
            journey.avoided.add(attempt.placement.prefill, failure.error, self._clock())
        elif not (failure.is_refusal and failure.had_prefill and failure.has_tokens):
            journey.avoided.add(attempt.placement.decode, failure.error, self._clock())

    def _has_other_prefill(self, journey: Journey) -> bool:
        views = [view for view in self._registry.views() if view.role is Role.PREFILL]
        usable = journey.avoided.usable(views, self._clock())
        return any(self._policy.strict or view not in journey.avoided for view in usable)

    def _note_failure(self, journey: Journey, failure: Failure) -> None:
        journey.last_error = failure.error
        if isinstance(failure.error, NoRoom):
            journey.no_room = failure.error
        if not failure.is_refusal:
            journey.retries_left -= 1
            journey.prefill_retried |= failure.blames_prefill
            journey.wait_until_s = self._clock() + self._policy.reconnect_wait_s

    def _note_report(self, journey: Journey, attempt: Attempt) -> None:
        if attempt.take_refetched_blocks():
            self._note_fallback(journey, Fallback.BLOCKS_REFETCHED)
        reuse = attempt.take_reuse()
        if reuse is not None and journey.attempt > 1:
            self._metrics.placed_again(reuse.num_reused, reuse.num_computed)

    def _note_fallback(self, journey: Journey, fallback: Fallback) -> None:
        journey.note_fallback(fallback)
        self._metrics.fell_back(fallback)

    async def _given_back(self, journey: Journey, attempt: Attempt, failure: Failure) -> None:
        """Workers that the next attempt may use again must have let go of this one: a transfer is open once. One that
        is lost is not used again before its release has been answered or given up."""
        may_be_reused = {Role.PREFILL, Role.DECODE} if journey.wants_prefill else {Role.DECODE}
        if isinstance(failure.error, PeerLost):
            may_be_reused.discard(Role.PREFILL if failure.blames_prefill else Role.DECODE)
        releases = [release for role, release in attempt.end().items() if role in may_be_reused]
        if releases:
            await asyncio.wait(releases, timeout=RELEASE_TIMEOUT_S)
