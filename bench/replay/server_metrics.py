"""What a Twostroke gateway's /metrics say, and how that changed over a run. Pure: text in, numbers out."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from common.telemetry.names import METRIC_CACHED_TOKENS, METRIC_FALLBACKS, METRIC_GATEWAY_MEMORY, METRIC_WORKER

Samples = Mapping[tuple[str, str, str], float]
"""(metric, worker, role) to its value; worker and role are empty where the metric has none."""

_WORKER_READY = f"{METRIC_WORKER}_ready"
_WORKER_MEMORY = f"{METRIC_WORKER}_peak_memory_bytes"
_KV_BYTES = f"{METRIC_WORKER}_kv_bytes_moved_total"
_WORKER_CACHED = f"{METRIC_WORKER}_cached_prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class ServerChange:
    """Totals after a run less those before it, and the state after it. Other servers have none of this."""

    num_prefill_workers: int
    num_decode_workers: int
    kv_bytes_moved: int  # sent by prefill workers
    cached_prompt_tokens: int  # counted by the workers
    cached_tokens: int  # counted by the gateway
    num_fallbacks: int
    backends: tuple[str, ...]
    peak_memory_bytes: Mapping[str, int]  # of each process since its start, where its system tells
    restarted: tuple[str, ...]  # workers whose totals fell, or that came or went


def read_samples(exposition: str) -> tuple[Samples, tuple[str, ...]] | None:
    """Samples and the workers' backends; None where no worker of Twostroke shows. Other labels are summed over."""
    samples: dict[tuple[str, str, str], float] = {}
    backends: set[str] = set()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("worker", ""), sample.labels.get("role", ""))
            samples[key] = samples.get(key, 0.0) + sample.value
            if sample.name == f"{METRIC_WORKER}_info":
                backends.add(sample.labels.get("backend", ""))
                # One start of a worker: as if it were a total, so that another start shows as one that came.
                incarnation = f"{METRIC_WORKER}_{sample.labels.get('incarnation', '')}_total"
                samples[incarnation, key[1], key[2]] = 1.0
    if not any(name == _WORKER_READY for name, _, _ in samples):
        return None
    return samples, tuple(sorted(backends))


def change(before: str, after: str) -> ServerChange | None:
    """None where either exposition shows no worker of Twostroke."""
    first, last = read_samples(before), read_samples(after)
    if first is None or last is None:
        return None
    (start, _), (end, backends) = first, last
    return ServerChange(
        num_prefill_workers=_num_workers(end, "prefill"),
        num_decode_workers=_num_workers(end, "decode"),
        kv_bytes_moved=_risen(start, end, _KV_BYTES, "prefill"),
        cached_prompt_tokens=_risen(start, end, _WORKER_CACHED, None),
        cached_tokens=_risen(start, end, METRIC_CACHED_TOKENS, None),
        num_fallbacks=_risen(start, end, METRIC_FALLBACKS, None),
        backends=backends,
        peak_memory_bytes=_peak_memory(end),
        restarted=tuple(sorted(_restarted(start, end))),
    )


def _num_workers(samples: Samples, of_role: str) -> int:
    return sum(name == _WORKER_READY and role == of_role for name, _, role in samples)


def _peak_memory(samples: Samples) -> dict[str, int]:
    workers = {key[1]: value for key, value in samples.items() if key[0] == _WORKER_MEMORY}
    peaks = {"gateway": samples.get((METRIC_GATEWAY_MEMORY, "", ""), 0.0), **workers}
    return {name: int(value) for name, value in peaks.items() if value}


def _risen(start: Samples, end: Samples, metric: str, role: str | None) -> int:
    keys = [key for key in end if key[0] == metric and role in (None, key[2])]
    return int(sum(end[key] - start.get(key, 0.0) for key in keys))


def _restarted(start: Samples, end: Samples) -> set[str]:
    is_total = {key for key in {*start, *end} if key[1] and key[0].endswith("_total")}
    return {key[1] for key in is_total if key not in start or key not in end or end[key] < start[key]}
