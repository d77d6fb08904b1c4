"""The two calls of one attempt, read side by side into one queue.

    prefill  ──FirstToken──HandedOff──▪
    decode   ──(waits for the commit)──────tokens──tokens──finish──▪

Promises: events keep each call's order; after `close` nothing more is read and both calls are ended. What an event
means is not known here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from common.errors import PeerLost, TwostrokeError
from common.pb.decode_pb2 import GenerateEvent
from common.pb.prefill_pb2 import PrefillEvent
from gateway.placement import Role
from gateway.worker import GenerateCall, RunCall, Worker, translate, was_reported

Call = GenerateCall | RunCall


@dataclass(frozen=True, slots=True)
class LegEnd:
    """A call is over: well (no error), or with what its worker raised or the transport found."""

    error: TwostrokeError | None = None
    was_reported: bool = False  # the worker itself raised it, so it is alive


Outcome = PrefillEvent | GenerateEvent | LegEnd


@dataclass(slots=True)
class _Leg:
    worker: Worker
    call: Call
    reader: "asyncio.Task[None]"
    has_begun: bool = False  # the worker has answered with its headers
    is_cut: bool = False


class Legs:
    """Open the prefill leg first. Time without progress is measured here: since the last event. A worker tells on each
    call that it goes on, also while the request waits in its queue, so a request that waits is never out of time, and
    one whose stream stands still is, however busy its worker is with others.
    """

    def __init__(self, clock: Callable[[], float], progress_timeout_s: float) -> None:
        self._clock = clock
        self._progress_timeout_s = progress_timeout_s
        self._events: asyncio.Queue[tuple[Role, Outcome]] = asyncio.Queue()
        self._legs: dict[Role, _Leg] = {}
        self._last_event_s = clock()
        self._watchdog: asyncio.TimerHandle | None = None
        self._is_closed = False

    def open(self, worker: Worker, call: Call) -> None:
        """Reads `call` from now on. Its leg is named by the worker's role."""
        reader = asyncio.create_task(self._read(worker.role))
        self._legs[worker.role] = _Leg(worker, call, reader)
        if self._watchdog is None:
            self._check_progress_in(self._progress_timeout_s)

    async def next(self) -> tuple[Role, Outcome]:
        """The next event of either leg."""
        return await self._events.get()

    def close(self, *, but: Role | None = None) -> dict[Role, "asyncio.Task[None]"]:
        """Ends both calls; the one of role `but` has said its last word and may end by itself.

        Returns the readers, which end with their calls. Idempotent. A call is cut as soon as it has begun: gRPC's
        `cancel` cancels a task of its own that waits for the headers, and a task that is cancelled while it waits for
        gRPC's core leaves memory behind. So readers are not cancelled either.
        """
        self._is_closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        for role, leg in self._legs.items():
            if role is not but:
                leg.is_cut = True
                if leg.has_begun:
                    leg.call.cancel()
        return {role: leg.reader for role, leg in self._legs.items()}

    async def _read(self, role: Role) -> None:
        leg = self._legs[role]
        call, peer = leg.call, leg.worker.name
        try:
            await call.initial_metadata()
            leg.has_begun = True
            if leg.is_cut:
                call.cancel()
            async for event in call:
                self._put(role, event)
        except grpc.aio.AioRpcError as error:
            self._put(role, LegEnd(translate(error, peer), was_reported(error)))
        except grpc.aio.UsageError:
            self._put(role, LegEnd(PeerLost(f"{peer} has left: its channel is closed")))
        except asyncio.CancelledError:
            # Ours when closed; else the channel went away under the call.
            self._put(role, LegEnd(PeerLost(f"{peer} has left: its channel was closed during a call")))
            call.cancel()
            raise
        else:
            self._put(role, LegEnd())

    def _put(self, role: Role, outcome: Outcome) -> None:
        if not self._is_closed:
            self._last_event_s = self._clock()
            self._events.put_nowait((role, outcome))

    def _check_progress_in(self, delay_s: float) -> None:
        self._watchdog = asyncio.get_running_loop().call_later(delay_s, self._check_progress)

    def _check_progress(self) -> None:
        """One timer for a generation, not one for each token."""
        open_legs = [leg for leg in self._legs.values() if not leg.reader.done()]
        if not open_legs:
            return
        left_s = self._last_event_s + self._progress_timeout_s - self._clock()
        if left_s > 0:
            self._check_progress_in(left_s)
            return
        worker = open_legs[0].worker  # prefill while it has to act, decode after it
        idle = f"nothing was heard of the request for {self._progress_timeout_s:g} s"
        self._put(worker.role, LegEnd(PeerLost(f"{worker.name} makes no progress: {idle}")))
