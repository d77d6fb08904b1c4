"""What the client saw of one request. Times are seconds since the run's start."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

DIGEST_CHARS = 32


def digest_of(content: bytes) -> str:
    """Of a request or an answer: equal contents have equal ones, and the report holds no text."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_CHARS]


class Outcome(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # by the client, as planned
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(slots=True)
class RequestRecord:
    num_input_tokens: int  # as planned
    queued_s: float  # when it was due: its arrival, or when its client became free
    sent_s: float = 0.0
    first_byte_s: float | None = None  # of the answer's body
    event_times_s: list[float] = field(default_factory=list)  # of events with text
    ended_s: float = 0.0
    status: int | None = None
    outcome: Outcome = Outcome.FAILED
    error: str | None = None  # a code or a class of error, never text of the server
    num_reported_tokens: int | None = None  # the server's usage
    num_cached_tokens: int | None = None
    kv_bytes: int | None = None  # moved for this request, as a Twostroke gateway tells
    exposed_transfer_s: float | None = None  # the same of the wait for it, after the first token
    request_digest: str = ""  # of prompt and limits: equal requests have equal ones, in any run
    pieces: list[str] = field(default_factory=list)  # the answer's text, for its digest alone

    @property
    def answer_digest(self) -> str | None:
        """Of the whole text; None unless the request completed."""
        return digest_of("".join(self.pieces).encode()) if self.outcome is Outcome.COMPLETED else None

    @property
    def num_output_tokens(self) -> int:
        """The server's count; events where it reported none (a cancelled request's, or all of some servers')."""
        return len(self.event_times_s) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def queue_s(self) -> float:
        return self.sent_s - self.queued_s

    @property
    def ttft_s(self) -> float | None:
        """From when it was due, so that a client that falls behind does not hide the server's delay."""
        return self.event_times_s[0] - self.queued_s if self.event_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first."""
        if len(self.event_times_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.event_times_s)]
