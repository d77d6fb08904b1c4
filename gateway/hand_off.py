"""One attempt at one generation: what its two calls say, in the order in which the client must see it.

Ends in a finish reason or in `LegFailed`; what follows a failure is decided elsewhere.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PeerLost, PushAbandoned, TransferError, TwostrokeError
from common.pb.decode_pb2 import GenerateEvent, GenerateStats
from common.pb.prefill_pb2 import FirstToken, PrefillEvent
from common.rpc.convert import finish_from_pb, token_from_pb
from common.sampling import FinishReason, OutputToken
from gateway.generation import KVTransfer, RequestTimes
from gateway.legs import LegEnd, Legs
from gateway.placement import Role


class LegFailed(Exception):
    """A worker failed this attempt. `role` is the one to blame; `error` is what the client hears if it is the end."""

    def __init__(self, role: Role, error: TwostrokeError) -> None:
        super().__init__(error.message)
        self.role = role
        self.error = error


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens in the order of the output."""

    tokens: tuple[OutputToken, ...]
    finish_reason: FinishReason | None
    finished_by: Role  # the leg that said so; meaningless without a finish reason


class HandOff:
    """Reads an attempt. With prefill: its first token, then decode's tokens. Without: decode's tokens."""

    def __init__(
        self,
        legs: Legs,
        times: RequestTimes,
        transfer: KVTransfer,
        clock: Callable[[], float],
        *,
        num_delivered: int,
        has_prefill: bool,
    ) -> None:
        self._legs = legs
        self._times = times
        self._transfer = transfer
        self._clock = clock
        self._needs_first_token = has_prefill
        self._is_handed_off = not has_prefill
        self._next_position = num_delivered  # of the output
        self._early: deque[GenerateEvent | LegEnd] = deque()  # decode's, here before prefill's first token
        self._first_token_s: float | None = None  # prefill's, until decode has spoken
        self.num_cached_tokens = 0
        self.kv_bytes = 0  # that decode gets from prefill; known with the reservation
        self.num_reused_tokens: int | None = None  # of this attempt; known with its first tokens
        self.num_refetched_blocks = 0
        self._has_stats = False

    async def next(self) -> Arrival:
        """Raises LegFailed. Not to be called after a finish reason."""
        while True:
            if self._early and not self._needs_first_token:
                arrival = self._on_decode(self._early.popleft())
            else:
                arrival = self._interpret(*await self._legs.next())
            if arrival is not None:
                return arrival

    def _interpret(self, role: Role, outcome: PrefillEvent | GenerateEvent | LegEnd) -> Arrival | None:
        if isinstance(outcome, PrefillEvent):
            return self._on_prefill(outcome)
        if role is Role.PREFILL:
            assert isinstance(outcome, LegEnd)
            self._on_prefill_end(outcome)
            return None
        if self._needs_first_token and self._can_wait(outcome):
            self._early.append(outcome)
            return None
        return self._on_decode(outcome)

    def _can_wait(self, outcome: GenerateEvent | LegEnd) -> bool:
        """The two calls are two connections: decode's may be read to its end before prefill's first token is here. A
        push is abandoned too when that token ends the request."""
        if isinstance(outcome, GenerateEvent) or isinstance(outcome.error, PushAbandoned):
            return True
        last = self._early[-1] if self._early else None
        return isinstance(last, GenerateEvent) and finish_from_pb(last.finish_reason) is not None

    def _on_prefill(self, event: PrefillEvent) -> Arrival | None:
        if event.HasField("progress"):
            return None
        if event.HasField("handed_off"):
            self._is_handed_off = True
            return None
        if not self._needs_first_token:
            raise LegFailed(Role.PREFILL, TransferError("prefill sent a second first token"))
        return self._first_token(event.first_token)

    def _on_prefill_end(self, end: LegEnd) -> None:
        """Of no interest once decode has everything."""
        if self._is_handed_off and not self._needs_first_token:
            return
        if end.error is None:
            raise LegFailed(Role.PREFILL, TransferError("prefill ended its stream without handing off"))
        # A live prefill worker that reports a lost peer means decode, its only one.
        is_about_decode = end.was_reported and isinstance(end.error, PeerLost)
        raise LegFailed(Role.DECODE if is_about_decode else Role.PREFILL, end.error)

    def _first_token(self, first: FirstToken) -> Arrival:
        self._needs_first_token = False
        self._next_position += 1
        self.num_cached_tokens = self.num_reused_tokens = first.num_cached_tokens
        self._note_first_token(first.queue_s, first.prefill_s)
        self._first_token_s = self._clock()
        return Arrival((token_from_pb(first.token),), finish_from_pb(first.finish_reason), Role.PREFILL)

    def _on_decode(self, outcome: GenerateEvent | LegEnd) -> Arrival | None:
        if isinstance(outcome, LegEnd):
            error = outcome.error or PeerLost("decode ended its stream without a finish reason")
            raise LegFailed(Role.DECODE, error)
        self._note_transfer(outcome)
        return self._tokens(outcome)

    def _note_transfer(self, event: GenerateEvent) -> None:
        """Decode's first event says how long ago it had all blocks; what the client waited before that was for them."""
        if self._first_token_s is None or not event.HasField("stats"):
            return
        since_commit_s = event.stats.queue_s + event.stats.prefill_s
        self._transfer.add(self.kv_bytes, max(0.0, self._clock() - self._first_token_s - since_commit_s))
        self._first_token_s = None

    def _tokens(self, event: GenerateEvent) -> Arrival | None:
        """Decode has spoken, so the commit has arrived there."""
        self._is_handed_off = True
        if event.HasField("stats"):
            self._note_stats(event.stats)
        finish_reason = finish_from_pb(event.finish_reason)
        if not event.tokens and finish_reason is None:
            return None
        if event.first_position != self._next_position:
            message = f"decode's tokens begin at output position {event.first_position}; {self._next_position} is next"
            raise LegFailed(Role.DECODE, TransferError(message))
        self._next_position += len(event.tokens)
        return Arrival(tuple(token_from_pb(token) for token in event.tokens), finish_reason, Role.DECODE)

    def _note_stats(self, stats: GenerateStats) -> None:
        if not self._has_stats:
            self.num_refetched_blocks = stats.num_refetched_blocks
        self._has_stats = True
        if self.num_reused_tokens is None:
            self.num_reused_tokens = stats.num_cached_tokens
        if not self._times.first_token:
            self.num_cached_tokens = stats.num_cached_tokens
            self._note_first_token(stats.queue_s, stats.prefill_s)

    def _note_first_token(self, queue_s: float, prefill_s: float) -> None:
        """Of the generation, not of a later attempt."""
        if not self._times.first_token:
            self._times.first_token = self._clock()
            self._times.queue_s = queue_s
            self._times.prefill_s = prefill_s
