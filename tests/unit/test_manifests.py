"""The manifests are valid and mean what they should; each check finds the fault that it is there for."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.pb import decode_pb2, prefill_pb2
from k8s.checks.network import is_allowed
from k8s.checks.settings import SERVICES
from k8s.kustomize import Object, build
from k8s.manifests import Manifests, Workload
from k8s.validate import ROOT, kustomizations, policy_faults, schema_faults, validate

BASE = build(ROOT / "base")
GPU = build(ROOT / "overlays" / "gpu")
WORKERS = ("twostroke-prefill", "twostroke-decode")
OVERLAYS = pytest.mark.parametrize("folder", kustomizations(), ids=lambda folder: folder.name)


def workload(manifests: Manifests, name: str) -> Workload:
    return next(found for found in manifests.workloads if found.name == name)


@OVERLAYS
def test_valid(folder: Path) -> None:
    assert validate(build(folder)) == []


@OVERLAYS
@pytest.mark.parametrize("name", SERVICES)
def test_each_service_accepts_its_environment(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = Manifests(build(folder))
    for variable in [key for key in os.environ if key.startswith("TWOSTROKE_")]:
        monkeypatch.delenv(variable)
    for variable, value in manifests.environment(workload(manifests, name)).items():
        monkeypatch.setenv(variable, value)
    settings = SERVICES[name].load([])
    opened = workload(manifests, name).container_ports.values()
    assert settings.model_dump()["port"] in opened
    assert settings.model_dump()["host"] == "0.0.0.0"


def test_service_links_would_have_been_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why enableServiceLinks is false: Kubernetes would set this in every pod of the namespace."""
    monkeypatch.setenv("TWOSTROKE_GATEWAY_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match="TWOSTROKE_GATEWAY_SERVICE_HOST"):
        SERVICES["twostroke-gateway"].load([])


def test_prefill_and_decode_serve_one_model_over_one_index() -> None:
    manifests = Manifests(BASE)
    prefill, decode = (manifests.environment(workload(manifests, name)) for name in WORKERS)
    for setting in ("MODEL", "REDIS_URL"):
        assert prefill[f"TWOSTROKE_PREFILL_{setting}"] == decode[f"TWOSTROKE_DECODE_{setting}"]


def test_readiness_asks_for_a_service_of_the_protocol() -> None:
    served = {
        "twostroke-prefill": prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
        "twostroke-decode": decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    }
    for name, service in served.items():
        (container,) = workload(Manifests(BASE), name).containers
        assert container["readinessProbe"]["grpc"]["service"] == service
        assert "service" not in container["livenessProbe"]["grpc"]


def test_network_policies_open_these_paths_and_no_other() -> None:
    manifests = Manifests(BASE)
    names = [found.name.removeprefix("twostroke-") for found in manifests.workloads]
    opened = {
        (source, destination)
        for source in names
        for destination in names
        for port in workload(manifests, f"twostroke-{destination}").container_ports.values()
        if is_allowed(
            manifests,
            workload(manifests, f"twostroke-{source}"),
            workload(manifests, f"twostroke-{destination}"),
            port,
        )
    }
    services = ("gateway", "prefill", "decode")
    expected = {("gateway", "prefill"), ("gateway", "decode"), ("prefill", "decode")}
    expected |= {(service, shared) for service in services for shared in ("redis", "collector")}
    assert opened == expected


def test_redis_keeps_nothing_and_forgets_the_oldest() -> None:
    (container,) = workload(Manifests(BASE), "twostroke-redis").containers
    arguments = container["args"]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert (options["--save"], options["--appendonly"]) == ("", "no")
    assert options["--maxmemory-policy"] == "allkeys-lru"
    assert "--maxmemory" in options


def test_the_gpu_overlay_gives_each_worker_a_gpu_and_the_gateway_none() -> None:
    manifests = Manifests(build(ROOT / "overlays" / "gpu"))
    for name in WORKERS:
        (container,) = workload(manifests, name).containers
        environment = manifests.environment(workload(manifests, name))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["image"].endswith("-cuda")
        assert "cuda" in [value for key, value in environment.items() if key.endswith("_DEVICE")]
    (gateway,) = workload(manifests, "twostroke-gateway").containers
    assert "nvidia.com/gpu" not in gateway["resources"]["limits"]


def test_the_schema_is_strict() -> None:
    (service, *_) = copy.deepcopy(Manifests(BASE).of_kind("Service"))
    service["spec"]["ports"][0]["prot"] = 1
    assert "prot" in schema_faults(service)[0]
    assert "no-such-kind" in schema_faults({"apiVersion": "v1", "kind": "no-such-kind", "metadata": {"name": "x"}})[0]


def _pod(objects: list[Object], name: str) -> Any:
    return workload(Manifests(objects), name).pod


def _container(objects: list[Object], name: str) -> Any:
    return _pod(objects, name)["containers"][0]


def _variable(objects: list[Object], name: str, variable: str) -> Any:
    return next(entry for entry in _container(objects, name)["env"] if entry["name"] == variable)


def _named(objects: list[Object], kind: str, name: str) -> Any:
    return Manifests(objects).find(kind, name)


DECODE = "twostroke-decode"
FAULTS: dict[str, Callable[[list[Object]], object]] = {
    "enableServiceLinks must be false": lambda o: _pod(o, DECODE).pop("enableServiceLinks"),
    "automountServiceAccountToken must be false": lambda o: _pod(o, DECODE).pop("automountServiceAccountToken"),
    "hostNetwork must not be set": lambda o: _pod(o, DECODE).update(hostNetwork=True),
    "volume models is a hostPath": lambda o: _pod(o, DECODE)["volumes"].__setitem__(
        0, {"name": "models", "hostPath": {"path": "/"}}
    ),
    "runAsNonRoot and a runAsUser": lambda o: _pod(o, DECODE)["securityContext"].update(runAsUser=0),
    "seccompProfile must be RuntimeDefault": lambda o: _pod(o, DECODE)["securityContext"].pop("seccompProfile"),
    "readOnlyRootFilesystem must be true": lambda o: _container(o, DECODE)["securityContext"].pop(
        "readOnlyRootFilesystem"
    ),
    "allowPrivilegeEscalation must be false": lambda o: _container(o, DECODE)["securityContext"].pop(
        "allowPrivilegeEscalation"
    ),
    "capabilities must drop ALL": lambda o: _container(o, DECODE)["securityContext"].update(
        capabilities={"drop": ["ALL"], "add": ["SYS_NICE"]}
    ),
    "privileged is set on the pod alone": lambda o: _container(o, DECODE)["securityContext"].update(privileged=False),
    "no startupProbe": lambda o: _container(o, DECODE).pop("startupProbe"),
    "livenessProbe: port 9 is not opened": lambda o: _container(o, DECODE)["livenessProbe"]["grpc"].update(port=9),
    "needs a request and a limit of memory": lambda o: _container(o, DECODE)["resources"]["limits"].pop("memory"),
    "requests 500m of cpu, above its limit 100m": lambda o: _container(o, "twostroke-gateway")["resources"][
        "limits"
    ].update(cpu="100m"),
    "needs a tag other than latest": lambda o: _container(o, DECODE).update(image="twostroke-decode:latest"),
    "'registry:5000/twostroke-decode' needs a tag": lambda o: _container(o, DECODE).update(
        image="registry:5000/twostroke-decode"
    ),
    "TWOSTROKE_DECODE_COLOUR is no setting": lambda o: _container(o, DECODE)["env"].append(
        {"name": "TWOSTROKE_DECODE_COLOUR", "value": "red"}
    ),
    "MiB of KV do not fit": lambda o: _variable(o, DECODE, "TWOSTROKE_DECODE_KV_MEMORY_MIB").update(value="11000"),
    "terminationGracePeriodSeconds is 30, less than": lambda o: _pod(o, DECODE).update(
        terminationGracePeriodSeconds=30
    ),
    "minReadySeconds is 0, less than 5": lambda o: workload(Manifests(o), DECODE).spec.pop("minReadySeconds"),
    "has no TLS, while twostroke-decode, twostroke-gateway has": lambda o: _container(o, "twostroke-prefill")[
        "env"
    ].remove(_variable(o, "twostroke-prefill", "TWOSTROKE_PREFILL_TLS_DIR")),
    "neither TLS_DIR nor ALLOW_UNENCRYPTED": lambda o: _named(o, "ConfigMap", "twostroke-settings")["data"].pop(
        "tls-dir"
    ),
    "no Secret is mounted at /etc/twostroke-tls": lambda o: _container(o, DECODE)["volumeMounts"][1].update(
        mountPath="/elsewhere"
    ),
    "readinessProbe: port 50051 speaks TLS": lambda o: _container(o, DECODE)["readinessProbe"]["grpc"].update(
        port=50051
    ),
    "there is no Service 'twostroke-redi'": lambda o: _named(o, "ConfigMap", "twostroke-settings")["data"].update(
        {"redis-url": "redis://twostroke-redi:6379/0"}
    ),
    "Service/twostroke-redis has no port 6380": lambda o: _named(o, "ConfigMap", "twostroke-settings")["data"].update(
        {"redis-url": "redis://twostroke-redis:6380/0"}
    ),
    "do not let it reach Deployment/twostroke-collector": lambda o: o.remove(
        _named(o, "NetworkPolicy", "twostroke-collector")
    ),
    "do not let it reach StatefulSet/twostroke-decode": lambda o: _named(o, "NetworkPolicy", "twostroke-prefill")[
        "spec"
    ].pop("egress"),
    "defined 2 times": lambda o: o.append(copy.deepcopy(o[0])),
    "names a namespace": lambda o: o[0]["metadata"].update(namespace="here"),
    "its selector does not select its own pods": lambda o: (
        workload(Manifests(o), DECODE).spec["selector"].update(matchLabels={"a": "b"})
    ),
    "its selector also selects the pods of": lambda o: (
        workload(Manifests(o), DECODE).spec["selector"].update(matchLabels={"app.kubernetes.io/name": "twostroke"})
    ),
    "must select the pods of exactly one workload": lambda o: _named(o, "PodDisruptionBudget", DECODE)["spec"].update(
        selector={"matchLabels": {"a": "b"}}
    ),
    "NetworkPolicy/twostroke-decode: {'matchLabels'": lambda o: _named(o, "NetworkPolicy", DECODE)["spec"].update(
        podSelector={"matchLabels": {"a": "b"}}
    ),
    "selects the pods of 0 workloads": lambda o: _named(o, "Service", "twostroke-redis")["spec"].update(
        selector={"a": "b"}
    ),
    "opens no port 'grcp'": lambda o: _named(o, "Service", DECODE)["spec"]["ports"][0].update(targetPort="grcp"),
    "is no headless Service": lambda o: _named(o, "Service", DECODE)["spec"].pop("clusterIP"),
    "ServiceAccount 'nobody' is not defined": lambda o: _pod(o, DECODE).update(serviceAccountName="nobody"),
    "volume models is of PersistentVolumeClaim": lambda o: o.remove(
        _named(o, "PersistentVolumeClaim", "twostroke-models")
    ),
    "mounts volume 'cash'": lambda o: _container(o, DECODE)["volumeMounts"][0].update(name="cash"),
    "is of key 'modell', not in": lambda o: _variable(o, DECODE, "TWOSTROKE_DECODE_MODEL")["valueFrom"][
        "configMapKeyRef"
    ].update(key="modell"),
    "is of ConfigMap 'settings', which is not defined": lambda o: _variable(o, DECODE, "TWOSTROKE_DECODE_MODEL")[
        "valueFrom"
    ]["configMapKeyRef"].update(name="settings"),
}


CERTIFICATE_FAULTS: dict[str, Callable[[list[Object]], object]] = {
    "there is no Issuer 'nobody'": lambda o: _named(o, "Certificate", DECODE)["spec"]["issuerRef"].update(
        name="nobody"
    ),
    "no Certificate makes its secret 'twostroke-decode-tls'": lambda o: o.remove(_named(o, "Certificate", DECODE)),
    "Certificate/twostroke-decode: the DNS name": lambda o: _named(o, "Certificate", DECODE)["spec"].update(
        dnsNames=["decode"]
    ),
    "Certificate/twostroke-gateway: the DNS name": lambda o: _named(o, "Certificate", "twostroke-gateway")[
        "spec"
    ].update(dnsNames=["twostroke-worker"]),
    "Certificate/twostroke-prefill: lacks usages client auth": lambda o: _named(o, "Certificate", "twostroke-prefill")[
        "spec"
    ].update(usages=["server auth"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_find(fault: str) -> None:
    objects = copy.deepcopy(BASE)
    FAULTS[fault](objects)
    assert any(fault in found for found in policy_faults(objects)), policy_faults(objects)


@pytest.mark.parametrize("fault", CERTIFICATE_FAULTS)
def test_checks_of_certificates_find(fault: str) -> None:
    objects = copy.deepcopy(GPU)
    CERTIFICATE_FAULTS[fault](objects)
    assert any(fault in found for found in policy_faults(objects)), policy_faults(objects)


@pytest.mark.parametrize(("overlay", "is_encrypted"), [("gpu", True), ("local", False)])
def test_mutual_tls_is_on_but_where_an_overlay_says_that_it_is_not(overlay: str, is_encrypted: bool) -> None:
    manifests = Manifests(build(ROOT / "overlays" / overlay))
    for name in SERVICES:
        environment = manifests.environment(workload(manifests, name))
        prefix = name.upper().replace("-", "_")
        assert (f"{prefix}_TLS_DIR" in environment) == is_encrypted
        assert f"{prefix}_TLS_DIR" in Manifests(BASE).environment(workload(Manifests(BASE), name))


def test_what_comes_from_a_secret_is_not_read() -> None:
    objects = copy.deepcopy(BASE)
    entry = _variable(objects, DECODE, "TWOSTROKE_DECODE_REDIS_URL")
    entry["valueFrom"] = {"secretKeyRef": {"name": "index", "key": "url"}}
    manifests = Manifests(objects)
    assert "TWOSTROKE_DECODE_REDIS_URL" not in manifests.environment(workload(manifests, DECODE))
    assert policy_faults(objects) == []
