"""What the gateway's back half counts: placements, fallbacks, moves, failures, the index, blocks given back."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.errors import TwostrokeError
from common.process_memory import peak_memory_bytes
from common.telemetry import names
from gateway.generation import OnFailure
from gateway.placement import Fallback, PlacementReason, Role


class DispatchMetrics:
    """Every label value exists from the start, so that a rate can be taken of the first one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._placements = Counter(
            names.METRIC_PLACEMENTS.removesuffix("_total"), "Placements, by reason", ["reason"], registry=registry
        )
        self._fallbacks = Counter(
            names.METRIC_FALLBACKS.removesuffix("_total"),
            "Times that the planned way of a generation was left, by reason",
            ["reason"],
            registry=registry,
        )
        self._released_blocks = Counter(
            names.METRIC_RELEASED_BLOCKS.removesuffix("_total"),
            "KV blocks that workers freed when a generation ended, by role",
            ["role"],
            registry=registry,
        )
        self._replaced_tokens = Counter(
            names.METRIC_REPLACED_TOKENS.removesuffix("_total"),
            "Tokens of generations that were placed again: reused from what a worker held, or computed again",
            ["how"],
            registry=registry,
        )
        self._given_up = Counter(
            names.METRIC_GIVEN_UP.removesuffix("_total"),
            "Generations that ended with the failure of a worker or a transfer, by its error and their policy",
            ["reason", "on_failure"],
            registry=registry,
        )
        self._waiting = Gauge(
            names.METRIC_WAITING, "Generations that wait for prefill's queue and hold nothing yet", registry=registry
        )
        self._index_available = Gauge(
            names.METRIC_INDEX_AVAILABLE,
            "1 while the prefix index answers in time; 0: routing by load alone",
            registry=registry,
        )
        for reason in PlacementReason:
            self._placements.labels(reason.value)
        for fallback in Fallback:
            self._fallbacks.labels(fallback.value)
        for how in ("reused", "computed"):
            self._replaced_tokens.labels(how)
        for role in Role:
            self._released_blocks.labels(role.value)

    def placed(self, reason: PlacementReason) -> None:
        self._placements.labels(reason.value).inc()

    def fell_back(self, fallback: Fallback) -> None:
        self._fallbacks.labels(fallback.value).inc()

    def placed_again(self, num_reused: int, num_computed: int) -> None:
        self._replaced_tokens.labels("reused").inc(num_reused)
        self._replaced_tokens.labels("computed").inc(num_computed)

    def waiting(self, num_generations: int) -> None:
        self._waiting.set(num_generations)

    def gave_up(self, error: TwostrokeError, on_failure: OnFailure) -> None:
        self._given_up.labels(error.code, on_failure.value).inc()

    def freed(self, role: Role, num_blocks: int) -> None:
        self._released_blocks.labels(role.value).inc(num_blocks)

    def index_available(self, is_available: bool) -> None:
        self._index_available.set(is_available)


def show_peak_memory(registry: CollectorRegistry) -> None:
    """Of the gateway's own process; workers tell theirs in their status."""
    gauge = Gauge(names.METRIC_GATEWAY_MEMORY, "Most memory that the gateway has had resident", registry=registry)
    gauge.set_function(peak_memory_bytes)
