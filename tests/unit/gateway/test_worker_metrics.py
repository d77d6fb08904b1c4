"""Every field of every worker's status is there for Prometheus."""

from google.protobuf.descriptor import FieldDescriptor
from prometheus_client import CollectorRegistry, generate_latest

from common.pb.worker_pb2 import WorkerInfo, WorkerStatus
from common.rpc.channel import open_channel
from gateway.placement import Role
from gateway.worker import Worker, WorkerState
from gateway.worker_metrics import WorkerCollector


async def test_every_field_is_shown() -> None:
    worker = Worker("10.0.0.1:1", Role.PREFILL, open_channel("127.0.0.1:9"))
    worker.info = WorkerInfo(worker_id="p0", incarnation=b"\x01" * 16, backend="cpu")
    worker.state = WorkerState.READY
    fields = [field for field in WorkerStatus.DESCRIPTOR.fields if field.type != FieldDescriptor.TYPE_BYTES]
    worker.status = WorkerStatus(**{field.name: number % 2 for number, field in enumerate(fields)})  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: [worker]))
    labels = {"worker": "p0", "role": "prefill"}
    text = generate_latest(registry).decode()
    for number, field in enumerate(fields):
        name = f"twostroke_worker_{field.name}"
        kind = "gauge" if f"# TYPE {name} gauge" in text else "counter"
        suffix = "_total" if kind == "counter" else ""
        assert registry.get_sample_value(name + suffix, labels) == number % 2, name
    assert registry.get_sample_value("twostroke_worker_ready", labels) == 1
    assert 'incarnation="' + "01" * 16 in text
    assert "# TYPE twostroke_worker_num_steps_total counter" in text
    worker.state = WorkerState.LOST
    assert registry.get_sample_value("twostroke_worker_ready", labels) == 0
    assert registry.get_sample_value("twostroke_worker_free_blocks", labels) is None
    assert registry.get_sample_value("twostroke_worker_num_steps_total", labels) is not None
    await worker.close()


async def test_unknown_workers_are_left_out() -> None:
    worker = Worker("10.0.0.1:1", Role.DECODE, open_channel("127.0.0.1:9"))
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: [worker]))
    assert 'worker="' not in generate_latest(registry).decode()
    await worker.close()
