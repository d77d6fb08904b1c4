"""A trace: which requests arrive when, how long they are, what they share, which are cancelled. Pure."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.replay import draws
from common.errors import ConfigError

BUCKETS = ((0, 512), (513, 2048), (2049, 8192))
"""Prompt lengths in tokens that are drawn and reported together; both ends included."""


class Arrivals(StrEnum):
    POISSON = "poisson"
    BURST = "burst"
    CLOSED = "closed"  # a fixed number of clients, each of which asks again when it is answered
    RECORDED = "recorded"  # the times of a trace that was read


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens. Segments of one name begin with the same tokens."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    arrival_s: float  # since the trace's start; 0 in a closed loop
    num_output_tokens: int
    segments: tuple[Segment, ...]
    cancel_after: int | None = None  # events with text after which the client leaves

    @property
    def num_input_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Trace:
    """What is replayed. `seed` names the prompts' tokens and is no part of the shape."""

    seed: int
    arrivals: Arrivals
    num_clients: int | None  # of a closed loop
    requests: tuple[PlannedRequest, ...]

    def digest(self) -> str:
        """Of the shape: arrivals, lengths, what is shared, cancellations. Runs compare only where it is equal."""
        numbers: dict[str, int] = {}
        shape = [
            [
                request.arrival_s,
                request.num_output_tokens,
                request.cancel_after,
                [[numbers.setdefault(part.name, len(numbers)), part.num_tokens] for part in request.segments],
            ]
            for request in self.requests
        ]
        content = json.dumps([self.arrivals.value, self.num_clients, shape], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Of a synthetic trace. Prompt lengths are uniform over the chosen bucket's overlap with min_input..max_input."""

    seed: int = 0
    num_requests: int = 64
    arrivals: Arrivals = Arrivals.POISSON
    rate_per_s: float = 1.0  # mean, of Poisson arrivals and of bursts
    burst_size: int = 8
    num_clients: int = 8
    bucket_weights: tuple[float, ...] = (1.0, 0.0, 0.0)
    min_input: int = 1
    max_input: int = 8192
    min_output: int = 16
    max_output: int = 128
    shared_prefix_share: float = 0.0  # of each prompt's tokens, rounded down
    num_prefixes: int = 1
    cancel_share: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the setting, its value and what is allowed."""
        _require(self.num_requests >= 1, "num_requests", self.num_requests, "at least 1")
        _require(self.rate_per_s > 0, "rate_per_s", self.rate_per_s, "above 0")
        _require(self.burst_size >= 1, "burst_size", self.burst_size, "at least 1")
        _require(self.num_clients >= 1, "num_clients", self.num_clients, "at least 1")
        _require(self.num_prefixes >= 1, "num_prefixes", self.num_prefixes, "at least 1")
        _require(0 <= self.shared_prefix_share < 1, "shared_prefix_share", self.shared_prefix_share, "in [0, 1)")
        _require(0 <= self.cancel_share <= 1, "cancel_share", self.cancel_share, "in [0, 1]")
        _require(self.min_input >= 1, "min_input", self.min_input, "at least 1")
        _require(1 <= self.min_output <= self.max_output, "min_output", self.min_output, "from 1 to max_output")
        weights = self.bucket_weights
        are_weights = len(weights) == len(BUCKETS) and min(weights) >= 0 and sum(weights) > 0
        _require(are_weights, "bucket_weights", weights, f"{len(BUCKETS)} weights of at least 0, one above 0")
        for weight, bounds in zip(weights, self.length_bounds(), strict=True):
            _require(weight == 0 or bounds[0] <= bounds[1], "min_input, max_input", bounds, "some length of the bucket")

    def length_bounds(self) -> list[tuple[int, int]]:
        return [(max(low, self.min_input), min(high, self.max_input)) for low, high in BUCKETS]


def make_trace(settings: TraceSettings) -> Trace:
    """The same settings make the same trace."""
    arrivals = _arrival_times(settings)
    requests = tuple(_planned(settings, index, arrival) for index, arrival in enumerate(arrivals))
    num_clients = settings.num_clients if settings.arrivals is Arrivals.CLOSED else None
    return Trace(settings.seed, settings.arrivals, num_clients, requests)


def bucket_of(num_input_tokens: int) -> str:
    for low, high in BUCKETS:
        if low <= num_input_tokens <= high:
            return f"{low}-{high}"
    return f"over {BUCKETS[-1][1]}"


def shared_token_share(requests: Sequence[PlannedRequest]) -> float:
    """Prompt tokens that an earlier request's prompt began with as well, over all prompt tokens."""
    seen: dict[tuple[str, ...], int] = {}
    shared = 0
    for request in requests:
        shared += _num_seen_tokens(request.segments, seen)
        _remember(request.segments, seen)
    return shared / max(1, sum(request.num_input_tokens for request in requests))


def _num_seen_tokens(segments: Iterable[Segment], seen: dict[tuple[str, ...], int]) -> int:
    path: tuple[str, ...] = ()
    total = 0
    for segment in segments:
        path = (*path[-1:], segment.name)  # a segment counts where it follows the same one
        known = min(seen.get(path, 0), segment.num_tokens)
        total += known
        if known < segment.num_tokens:
            break
    return total


def _remember(segments: Iterable[Segment], seen: dict[tuple[str, ...], int]) -> None:
    path: tuple[str, ...] = ()
    for segment in segments:
        path = (*path[-1:], segment.name)
        seen[path] = max(seen.get(path, 0), segment.num_tokens)


def _arrival_times(settings: TraceSettings) -> list[float]:
    """Seconds, to the microsecond, so that the last bit of a logarithm cannot change a trace."""
    count = settings.num_requests
    if settings.arrivals is Arrivals.CLOSED:
        return [0.0] * count
    if settings.arrivals is Arrivals.BURST:
        return [
            round(index // settings.burst_size * settings.burst_size / settings.rate_per_s, 6) for index in range(count)
        ]
    if settings.arrivals is Arrivals.POISSON:
        gaps = [-math.log1p(-value) / settings.rate_per_s for value in draws.uniforms(settings.seed, "arrivals", count)]
        return [round(math.fsum(gaps[:index]), 6) for index in range(count)]
    raise ConfigError(f"arrivals is {settings.arrivals}; a synthetic trace has {[*Arrivals][:3]}")


def _planned(settings: TraceSettings, index: int, arrival_s: float) -> PlannedRequest:
    bucket, length, output, prefix, cancel, leave = draws.uniforms(settings.seed, f"request/{index}", 6)
    low, high = settings.length_bounds()[draws.weighted(bucket, settings.bucket_weights)]
    num_tokens = draws.integer(length, low, high)
    num_shared = int(num_tokens * settings.shared_prefix_share)
    shared = Segment(f"prefix/{draws.integer(prefix, 0, settings.num_prefixes - 1)}", num_shared)
    own = Segment(f"request/{index}", num_tokens - num_shared)
    num_output = draws.integer(output, settings.min_output, settings.max_output)
    return PlannedRequest(
        arrival_s,
        num_output,
        (shared, own) if num_shared else (own,),
        draws.integer(leave, 1, max(1, num_output - 1)) if cancel < settings.cancel_share else None,
    )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {allowed}")
