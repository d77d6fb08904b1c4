"""Mutual TLS between the services: all of them or none, with files that are there and names that peers expect."""

from common.config import Settings
from common.rpc.address import is_loopback
from common.rpc.tls import WORKER_NAME
from k8s.checks.settings import SERVICES, setting_names
from k8s.kustomize import Object
from k8s.manifests import Manifests, Problems, Workload, name_of

_USAGES = {
    "twostroke-gateway": {"client auth"},
    "twostroke-prefill": {"server auth", "client auth"},  # it is asked, and it pushes
    "twostroke-decode": {"server auth"},
}


def check_encryption(manifests: Manifests) -> Problems:
    services = [workload for workload in manifests.workloads if workload.name in SERVICES]
    encrypted = {workload.name for workload in services if _value(manifests, workload, "tls_dir")}
    for workload in services:
        if encrypted and workload.name not in encrypted:
            yield f"{workload.label}: has no TLS, while {', '.join(sorted(encrypted))} has"
        if workload.name in encrypted:
            yield from _check_files(manifests, workload)
            yield from _check_probes(manifests, workload)
        elif "allow_unencrypted" in SERVICES[workload.name].model_fields:
            host = _value(manifests, workload, "host") or ""
            if not is_loopback(host) and _value(manifests, workload, "allow_unencrypted") != "true":
                yield f"{workload.label}: neither TLS_DIR nor ALLOW_UNENCRYPTED: it would refuse to listen on {host}"


def check_certificates(manifests: Manifests) -> Problems:
    certificates = manifests.of_kind("Certificate")
    by_secret = {found["spec"]["secretName"]: found for found in certificates}
    for found in certificates:
        if manifests.find("Issuer", found["spec"]["issuerRef"]["name"]) is None:
            yield f"{name_of(found)}: there is no Issuer {found['spec']['issuerRef']['name']!r}"
    if not certificates:
        return
    for workload in manifests.workloads:
        if workload.name in _USAGES:
            for secret in _tls_secrets(manifests, workload):
                yield from _check_certificate(workload, secret, by_secret.get(secret))


def _check_certificate(workload: Workload, secret: str, certificate: Object | None) -> Problems:
    if certificate is None:
        yield f"{workload.label}: no Certificate makes its secret {secret!r}"
        return
    is_worker = "server auth" in _USAGES[workload.name]
    if is_worker != (WORKER_NAME in certificate["spec"]["dnsNames"]):
        yield f"{name_of(certificate)}: the DNS name {WORKER_NAME} is for workers, for all of them and for nobody else"
    missing = _USAGES[workload.name] - set(certificate["spec"].get("usages", []))
    if missing:
        yield f"{name_of(certificate)}: lacks usages {', '.join(sorted(missing))}"


def _check_files(manifests: Manifests, workload: Workload) -> Problems:
    if not _tls_secrets(manifests, workload):
        yield f"{workload.label}: no Secret is mounted at {_value(manifests, workload, 'tls_dir')}"


def _check_probes(manifests: Manifests, workload: Workload) -> Problems:
    for container in workload.pod["containers"]:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(name, {}).get("grpc", {}).get("port")
            if port is not None and str(port) != _value(manifests, workload, "health_port"):
                yield f"{workload.label}: {name}: port {port} speaks TLS, which the kubelet does not"


def _tls_secrets(manifests: Manifests, workload: Workload) -> list[str]:
    """Names of the Secrets at the place where the service looks for its files."""
    folder = _value(manifests, workload, "tls_dir")
    mounts = [mount for container in workload.containers for mount in container.get("volumeMounts", [])]
    wanted = {mount["name"] for mount in mounts if mount["mountPath"] == folder}
    volumes = [volume for volume in workload.pod.get("volumes", []) if volume["name"] in wanted]
    return [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]


def _value(manifests: Manifests, workload: Workload, field: str) -> str | None:
    """What the pod's variable for a setting says."""
    settings: type[Settings] = SERVICES[workload.name]
    names = {known: name for name, known in setting_names(settings).items()}
    return manifests.environment(workload).get(names.get(field, ""))
