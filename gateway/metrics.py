"""What the gateway's back half counts: placements, fallbacks, the index, blocks given back."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.process_memory import peak_memory_bytes
from common.telemetry import names
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
        self._index_available = Gauge(
            names.METRIC_INDEX_AVAILABLE,
            "1 while the prefix index answers in time; 0: routing by load alone",
            registry=registry,
        )
        for reason in PlacementReason:
            self._placements.labels(reason.value)
        for fallback in Fallback:
            self._fallbacks.labels(fallback.value)
        for role in Role:
            self._released_blocks.labels(role.value)

    def placed(self, reason: PlacementReason) -> None:
        self._placements.labels(reason.value).inc()

    def fell_back(self, fallback: Fallback) -> None:
        self._fallbacks.labels(fallback.value).inc()

    def freed(self, role: Role, num_blocks: int) -> None:
        self._released_blocks.labels(role.value).inc(num_blocks)

    def index_available(self, is_available: bool) -> None:
        self._index_available.set(is_available)


def show_peak_memory(registry: CollectorRegistry) -> None:
    """Of the gateway's own process; workers tell theirs in their status."""
    gauge = Gauge(names.METRIC_GATEWAY_MEMORY, "Most memory that the gateway has had resident", registry=registry)
    gauge.set_function(peak_memory_bytes)
