"""The pods' variables against the services' own Settings: names, the KV memory, and the time that a drain takes."""

from common.config import Settings
from decode_svc.config import DecodeSettings
from gateway.config import GatewaySettings
from k8s.manifests import Manifests, Problems, Workload, quantity
from prefill_svc.config import PrefillSettings

SERVICES: dict[str, type[Settings]] = {
    "twostroke-gateway": GatewaySettings,
    "twostroke-prefill": PrefillSettings,
    "twostroke-decode": DecodeSettings,
}
SHARED = frozenset({"TWOSTROKE_CACHE_DIR", "TWOSTROKE_STATE_DIR"})
"""Read by common.config for every service."""

SHUTDOWN_MARGIN_S = 10.0
"""Beside the drain itself: last messages, sending the last spans, leaving Python."""
MEETING_S = 10.0
"""Beside a gateway's look-up: how long a name's old addresses may be cached, and a worker's description taken."""
ROOM_BESIDE_KV_BYTES = 2.0 * 2**30
"""The least that a worker on CPUs needs beside its KV: interpreter, torch, a small model's weights."""


def setting_names(settings: type[Settings]) -> dict[str, str]:
    """Variable -> field."""
    prefix = settings.model_config.get("env_prefix", "")
    return {f"{prefix}{field}".upper(): field for field in settings.model_fields}


def check_setting_names(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        settings = SERVICES.get(workload.name)
        known = SHARED | set(setting_names(settings)) if settings else SHARED
        for container in workload.containers:
            for variable in container.get("env", []):
                if variable["name"].startswith("TWOSTROKE_") and variable["name"] not in known:
                    yield f"{workload.label}: {variable['name']} is no setting of this service"


def check_kv_memory(manifests: Manifests) -> Problems:
    """On a GPU the KV lies in the GPU's memory, which the manifests do not tell."""
    for workload in manifests.workloads:
        kv_memory_mib = _setting(manifests, workload, "kv_memory_mib")
        limits = workload.containers[0].get("resources", {}).get("limits", {})
        if kv_memory_mib is None or "nvidia.com/gpu" in limits or "memory" not in limits:
            continue
        if kv_memory_mib * 2**20 + ROOM_BESIDE_KV_BYTES > quantity(limits["memory"]):
            yield (
                f"{workload.label}: {kv_memory_mib:g} MiB of KV do not fit its memory limit of {limits['memory']} "
                f"with {ROOM_BESIDE_KV_BYTES / 2**30:g} GiB beside them"
            )


def check_shutdown(manifests: Manifests) -> Problems:
    """SIGTERM comes after preStop, and SIGKILL when the grace period is over: the drain must fit between them."""
    for workload in manifests.workloads:
        drain_s = _setting(manifests, workload, "drain_grace_s")
        if drain_s is None:
            continue
        wait_s = workload.containers[0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = workload.pod.get("terminationGracePeriodSeconds", 30)
        if grace_s < wait_s + drain_s + SHUTDOWN_MARGIN_S:
            yield (
                f"{workload.label}: terminationGracePeriodSeconds is {grace_s}, less than {wait_s} (preStop) + "
                f"{drain_s:g} (drain) + {SHUTDOWN_MARGIN_S:g}"
            )


def check_rollout(manifests: Manifests) -> Problems:
    """A rolling restart goes on when a pod is ready: by then every gateway must have met it."""
    gateway = next((found for found in manifests.workloads if found.name == "twostroke-gateway"), None)
    interval_s = _setting(manifests, gateway, "discovery_interval_s") if gateway is not None else None
    if interval_s is None:
        return
    for workload in manifests.workloads:
        if workload.name in SERVICES and workload.source["kind"] == "StatefulSet":
            wait_s = workload.spec.get("minReadySeconds", 0)
            if wait_s < interval_s + MEETING_S:
                yield (
                    f"{workload.label}: minReadySeconds is {wait_s}, less than {interval_s:g} (the look-up) + "
                    f"{MEETING_S:g} (cached names, reconnecting)"
                )


def _setting(manifests: Manifests, workload: Workload, field: str) -> float | None:
    """A numeric setting of one of our services, or its default; None for other workloads and other fields."""
    settings = SERVICES.get(workload.name)
    if settings is None or field not in settings.model_fields:
        return None
    variable = next(name for name, known in setting_names(settings).items() if known == field)
    return float(manifests.environment(workload).get(variable, settings.model_fields[field].default))
