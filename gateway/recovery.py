"""What follows the failure of a worker during a generation. Pure: the facts in, the next step out."""

from dataclasses import dataclass
from enum import StrEnum

from common.errors import Cancelled, Draining, NoRoom, PeerLost, TransferError, TwostrokeError, Unavailable
from gateway.generation import OnFailure
from gateway.placement import Fallback, Role

_SURVIVABLE = (PeerLost, TransferError, Unavailable, Cancelled)
_REFUSALS = (NoRoom, Draining)


class NextStep(StrEnum):
    AGAIN = "again"  # place again, as planned
    MOVE = "move"  # place again where most of its blocks are, and go on after the tokens that the client has
    RECOMPUTE = "recompute"  # decode computes the prompt, and goes on after the tokens that the client has
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, and what the generation had until then."""

    role: Role  # of the worker whose call failed
    error: TwostrokeError
    is_running: bool  # both calls were open; else the reservation failed
    had_prefill: bool  # the attempt was a hand-off
    has_tokens: bool  # the client has at least one token
    prefill_retried: bool  # an earlier attempt failed on its prefill side
    other_prefill: bool  # a prefill worker may take over: one that has not failed; where `strict` also one to use again
    retries_left: int
    strict: bool
    on_failure: OnFailure = OnFailure.RETRY_OTHER

    @property
    def is_refusal(self) -> bool:
        """The worker is well and says no: try the others; it does not count as a failure."""
        return isinstance(self.error, _REFUSALS)

    @property
    def blames_prefill(self) -> bool:
        """The prompt's side failed. A transfer has two ends; the one that sends is changed first."""
        is_transfer = self.had_prefill and self.is_running and isinstance(self.error, TransferError)
        return self.role is Role.PREFILL or is_transfer


@dataclass(frozen=True, slots=True)
class Recovery:
    step: NextStep
    fallback: Fallback | None = None


def recover(failure: Failure) -> Recovery:
    """Design section 7: a worker's failure is the client's only when nothing else is left to try."""
    if failure.is_refusal:
        return _recompute(failure, Fallback.DECODE_LOST) if failure.has_tokens else Recovery(NextStep.AGAIN)
    is_fatal = failure.on_failure is OnFailure.FAIL or not isinstance(failure.error, _SURVIVABLE)
    if is_fatal or failure.retries_left <= 0:
        return Recovery(NextStep.GIVE_UP)
    if failure.blames_prefill:
        return _without_this_prefill(failure)
    if failure.has_tokens:
        return _move(failure)
    return Recovery(NextStep.AGAIN, Fallback.DECODE_RETRIED)


def _move(failure: Failure) -> Recovery:
    """Decode is gone. What that led to is named when the new place is known."""
    if failure.had_prefill and failure.on_failure is not OnFailure.RECOMPUTE:
        return Recovery(NextStep.MOVE)
    return _recompute(failure, Fallback.DECODE_LOST)


def _without_this_prefill(failure: Failure) -> Recovery:
    """Decode computes the prompt rather than a third prefill worker, unless that would leave the planned way."""
    is_worth_it = not failure.has_tokens and (failure.strict or not failure.prefill_retried)
    if is_worth_it and failure.other_prefill and failure.on_failure is not OnFailure.RECOMPUTE:
        return Recovery(NextStep.AGAIN, Fallback.PREFILL_RETRIED)
    is_transfer = isinstance(failure.error, TransferError)
    return _recompute(failure, Fallback.TRANSFER_FAILED if is_transfer else Fallback.PREFILL_LOST)


def _recompute(failure: Failure, fallback: Fallback) -> Recovery:
    if failure.strict:
        return Recovery(NextStep.GIVE_UP)
    return Recovery(NextStep.RECOMPUTE, fallback)
