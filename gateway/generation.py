"""The seam between the HTTP surface and the hand-off: what a request asks, and what comes back."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.ids import RequestId
from common.sampling import FinishReason, OutputToken, SamplingParams


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the monotonic clock; filled in along the way, read once for the TTFT's parts.

    `received` when the HTTP request's head arrived, `tokenize_*` around template and tokenizer, `dispatched` when
    generate() was entered; then placement, reservation, the worker's own report, and the first visible byte.
    """

    received: float = 0.0
    tokenize_s: float = 0.0
    dispatched: float = 0.0
    place_s: float = 0.0
    reserve_s: float = 0.0
    run_started: float = 0.0  # the call that yields the first token was opened
    queue_s: float = 0.0  # reported by the worker
    prefill_s: float = 0.0  # reported by the worker
    transfer_s: float = 0.0  # exposed before the first token
    first_token: float = 0.0  # arrived at the gateway
    first_byte: float = 0.0  # handed to the client's connection
    last_byte: float = 0.0


@dataclass(slots=True)
class KVTransfer:
    """What moving the prompt's KV cost, summed over attempts in which decode took over; None: it never did."""

    num_bytes: int | None = None  # of the blocks that decode did not hold
    exposed_s: float | None = None  # from prefill's first token until decode could begin

    def add(self, num_bytes: int, exposed_s: float) -> None:
        self.num_bytes = (self.num_bytes or 0) + num_bytes
        self.exposed_s = (self.exposed_s or 0.0) + exposed_s


class OnFailure(StrEnum):
    """What the failure of a worker or of a transfer means for a request."""

    FAIL = "fail"  # its end
    RECOMPUTE = "recompute"  # decode computes what is lost
    RETRY_OTHER = "retry_other"  # another worker takes over; where there is none, as `recompute`


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice of one request: tokens in, sampling fixed (seed drawn already), tenant known."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    on_failure: OnFailure | None = None  # None: as the gateway is configured; likewise below
    max_retries: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    transfer: KVTransfer = field(default_factory=KVTransfer)


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that arrived together. The last delta of a generation carries the finish reason."""

    tokens: tuple[OutputToken, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt; 0 <= cached <= prompt; constant over a generation


@dataclass(slots=True)
class Route:
    """Where a generation went, for headers, metrics and spans. Filled in by the dispatcher before the first delta."""

    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""  # why this placement
    fallback: str = ""  # empty: none; else why the planned way was left


class Dispatcher(Protocol):
    """Carries a generation through placement, reservation, prefill, hand-off and decode."""

    def generate(self, generation: Generation, route: Route) -> AsyncGenerator[TokenDelta, None]:
        """Yields deltas until one has a finish reason.

        Closing the generator early (aclose, or cancelling its task) releases both sides. Raises errors of
        `common.errors`; before the first delta they become an HTTP status, after it an SSE error event.
        """
