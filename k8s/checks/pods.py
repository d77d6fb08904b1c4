"""What every pod must hold: no token, no service variables, no privileges, probes, resources, a named image."""

from k8s.kustomize import Object
from k8s.manifests import Manifests, Problems, Workload, quantity

_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_PROBES = ("readinessProbe", "livenessProbe")
_MINE = "twostroke-"


def check_isolation(manifests: Manifests) -> Problems:
    """Service variables would be taken for settings of ours; a token would be a way into the cluster."""
    for workload in manifests.workloads:
        if workload.pod.get("enableServiceLinks") is not False:
            yield f"{workload.label}: enableServiceLinks must be false: TWOSTROKE_*_PORT would be refused as a setting"
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield f"{workload.label}: automountServiceAccountToken must be false"
        for field in _HOST_FIELDS:
            if workload.pod.get(field):
                yield f"{workload.label}: {field} must not be set"
        for volume in workload.pod.get("volumes", []):
            if "hostPath" in volume:
                yield f"{workload.label}: volume {volume['name']} is a hostPath"


def check_security(manifests: Manifests) -> Problems:
    """The restricted Pod Security Standard, and read-only root file systems."""
    for workload in manifests.workloads:
        context = workload.pod.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{workload.label}: the pod must set runAsNonRoot and a runAsUser other than 0"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{workload.label}: the pod's seccompProfile must be RuntimeDefault"
        for container in workload.containers:
            yield from _check_container(f"{workload.label}: container {container['name']}", container)


def _check_container(where: str, container: Object) -> Problems:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{where}: allowPrivilegeEscalation must be false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{where}: readOnlyRootFilesystem must be true"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{where}: capabilities must drop ALL and add none"
    for field in ("privileged", "runAsUser", "runAsNonRoot"):
        if field in context:
            yield f"{where}: {field} is set on the pod alone, not on a container"


def check_probes(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        for container in workload.pod["containers"]:
            where = f"{workload.label}: container {container['name']}"
            needed = ("startupProbe", *_PROBES) if container["image"].startswith(_MINE) else _PROBES
            for probe in needed:
                if probe not in container:
                    yield f"{where}: no {probe}"
                else:
                    yield from _check_probe_port(f"{where}: {probe}", workload, container[probe])


def _check_probe_port(where: str, workload: Workload, probe: Object) -> Problems:
    for action in ("grpc", "httpGet", "tcpSocket"):
        if action in probe and workload.port_number(probe[action]["port"]) is None:
            yield f"{where}: port {probe[action]['port']} is not opened by the container"


def check_resources(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        for container in workload.containers:
            where = f"{workload.label}: container {container['name']}"
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            for resource in ("cpu", "memory"):
                if resource not in requests or resource not in limits:
                    yield f"{where}: needs a request and a limit of {resource}"
                elif quantity(requests[resource]) > quantity(limits[resource]):
                    yield f"{where}: requests {requests[resource]} of {resource}, above its limit {limits[resource]}"


def check_images(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        for container in workload.containers:
            name, _, tag = container["image"].rpartition(":")
            if not name or "/" in tag or tag in ("", "latest"):
                yield f"{workload.label}: image {container['image']!r} needs a tag other than latest"
