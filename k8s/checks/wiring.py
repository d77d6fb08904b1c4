"""Names that must meet: selectors and labels, Services and ports, references and the objects they name."""

from collections import Counter

from k8s.checks.network import local_selectors
from k8s.kustomize import Object
from k8s.manifests import Manifests, Problems, Workload, matches, name_of

MADE_BY_THE_OPERATOR = frozenset(
    ("Secret", f"twostroke-{name}") for name in ("gateway", "gateway-tls", "prefill-tls", "decode-tls")
)
"""What a base leaves to whoever deploys it; docs/deploying.md says how to make it."""


def check_names(manifests: Manifests) -> Problems:
    for name, count in Counter(map(name_of, manifests.objects)).items():
        if count > 1:
            yield f"{name}: defined {count} times"
    for found in manifests.objects:
        if "namespace" in found["metadata"]:
            yield f"{name_of(found)}: names a namespace; that is chosen when it is applied"


def check_selectors(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        if not matches(workload.spec["selector"], workload.pod_labels):
            yield f"{workload.label}: its selector does not select its own pods"
        others = [other.name for other in manifests.selected_by(workload.spec["selector"]) if other != workload]
        if others:
            yield f"{workload.label}: its selector also selects the pods of {', '.join(others)}"
    for budget in manifests.of_kind("PodDisruptionBudget"):
        if len(manifests.selected_by(budget["spec"]["selector"])) != 1:
            yield f"{name_of(budget)}: must select the pods of exactly one workload"
    for policy in manifests.of_kind("NetworkPolicy"):
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        peers = [peer for rule in rules for peer in [*rule.get("from", []), *rule.get("to", [])]]
        for selector in [policy["spec"]["podSelector"], *local_selectors(peers)]:
            if not manifests.selected_by(selector):
                yield f"{name_of(policy)}: {selector} selects no pod"


def check_services(manifests: Manifests) -> Problems:
    for service in manifests.of_kind("Service"):
        targets = manifests.selected_by({"matchLabels": service["spec"]["selector"]})
        if len(targets) != 1:
            yield f"{name_of(service)}: selects the pods of {len(targets)} workloads, must be one"
        for port in service["spec"]["ports"]:
            for workload in targets:
                if workload.port_number(port["targetPort"]) is None:
                    yield f"{name_of(service)}: {workload.label} opens no port {port['targetPort']!r}"
    for found in manifests.of_kind("StatefulSet"):
        governing = manifests.find("Service", found["spec"]["serviceName"])
        if governing is None or governing["spec"].get("clusterIP") != "None":
            yield f"{name_of(found)}: serviceName {found['spec']['serviceName']!r} is no headless Service"


def check_references(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        account = workload.pod.get("serviceAccountName", "default")
        if manifests.find("ServiceAccount", account) is None:
            yield f"{workload.label}: ServiceAccount {account!r} is not defined"
        for volume in workload.pod.get("volumes", []):
            yield from _check_volume(manifests, workload, volume)
        volumes = {volume["name"] for volume in workload.pod.get("volumes", [])}
        for container in workload.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{workload.label}: mounts volume {mount['name']!r}, which the pod does not have"
            yield from _check_config_keys(manifests, workload, container)


def _check_volume(manifests: Manifests, workload: Workload, volume: Object) -> Problems:
    sources = {
        "ConfigMap": volume.get("configMap", {}).get("name"),
        "Secret": volume.get("secret", {}).get("secretName"),
        "PersistentVolumeClaim": volume.get("persistentVolumeClaim", {}).get("claimName"),
    }
    for kind, name in sources.items():
        if name and manifests.find(kind, name) is None and (kind, name) not in MADE_BY_THE_OPERATOR:
            yield f"{workload.label}: volume {volume['name']} is of {kind} {name!r}, which is not defined"


def _check_config_keys(manifests: Manifests, workload: Workload, container: Object) -> Problems:
    for variable in container.get("env", []):
        reference = variable.get("valueFrom", {}).get("configMapKeyRef")
        if reference is None:
            continue
        config = manifests.find("ConfigMap", reference["name"])
        if config is None:
            yield f"{workload.label}: {variable['name']} is of ConfigMap {reference['name']!r}, which is not defined"
        elif reference["key"] not in config["data"] and not reference.get("optional"):
            yield f"{workload.label}: {variable['name']} is of key {reference['key']!r}, not in {name_of(config)}"
