"""Every field of every worker's last status, as Prometheus shows it: gauges for loads, counters for totals."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from google.protobuf.descriptor import FieldDescriptor
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.pb.worker_pb2 import WorkerStatus
from common.telemetry.names import METRIC_WORKER
from gateway.worker import Worker

LABELS = ("worker", "role")
_COUNTERS = frozenset(
    {
        "computed_prompt_tokens",
        "cached_prompt_tokens",
        "output_tokens",
        "num_steps",
        "kv_bytes_moved",
        "num_preemptions",
        "num_draft_tokens",
        "num_accepted_tokens",
    }
)


class WorkerCollector(Collector):
    """Reads the workers when Prometheus asks. One that is not ready shows `…_ready` 0 and its totals, but no load."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        """Nothing to check against: the workers are known later."""
        return ()

    def collect(self) -> Iterator[Metric]:
        workers = [worker for worker in self._workers() if worker.info.worker_id]
        yield _gauge("ready", "Whether the worker takes part", workers, lambda worker: float(worker.is_ready))
        info = InfoMetricFamily(METRIC_WORKER, "What the worker says of itself", labels=LABELS)
        for worker in workers:
            details = {"incarnation": worker.info.incarnation.hex(), "backend": worker.info.backend}
            info.add_metric(_labels(worker), {**details, "address": worker.address})
        yield info
        for field in WorkerStatus.DESCRIPTOR.fields:
            if field.type != FieldDescriptor.TYPE_BYTES:
                yield _family(field.name, workers)


def _family(name: str, workers: Sequence[Worker]) -> Metric:
    documentation = f"WorkerStatus.{name}"
    if name not in _COUNTERS:
        ready = [worker for worker in workers if worker.is_ready]
        return _gauge(name, documentation, ready, lambda worker: float(getattr(worker.status, name)))
    counter = CounterMetricFamily(f"{METRIC_WORKER}_{name}", documentation, labels=LABELS)
    for worker in workers:
        counter.add_metric(_labels(worker), getattr(worker.status, name))
    return counter


def _gauge(name: str, documentation: str, workers: Sequence[Worker], value: Callable[[Worker], float]) -> Metric:
    gauge = GaugeMetricFamily(f"{METRIC_WORKER}_{name}", documentation, labels=LABELS)
    for worker in workers:
        gauge.add_metric(_labels(worker), value(worker))
    return gauge


def _labels(worker: Worker) -> tuple[str, str]:
    return worker.info.worker_id, worker.role.value
