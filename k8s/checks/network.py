"""Every address that a pod is given leads to a Service, and the NetworkPolicies let it through, both ways."""

import re
from collections.abc import Iterable

from k8s.kustomize import Object
from k8s.manifests import Manifests, Problems, Workload, matches, name_of

# `name:port` without a dot: a Service of the same namespace.
_ADDRESS = re.compile(r"(?:^|[/,@])([a-z][a-z0-9-]*):(\d+)")

# Paths that no setting names: prefill is told the address of a decode worker with each request.
TOLD_AT_RUN_TIME = (("twostroke-prefill", "twostroke-decode"),)


def check_paths(manifests: Manifests) -> Problems:
    for workload in manifests.workloads:
        for variable, value in manifests.environment(workload).items():
            for host, port in _ADDRESS.findall(value):
                yield from _check_address(manifests, workload, f"{variable} ({host}:{port})", host, int(port))
    for source, destination in TOLD_AT_RUN_TIME:
        senders = [workload for workload in manifests.workloads if workload.name == source]
        service = manifests.find("Service", destination)
        port = service["spec"]["ports"][0]["port"] if service else 0
        for workload in senders:
            yield from _check_address(manifests, workload, f"{destination}:{port}", destination, port)


def _check_address(manifests: Manifests, workload: Workload, what: str, host: str, port: int) -> Problems:
    service = manifests.find("Service", host)
    if service is None:
        yield f"{workload.label}: {what}: there is no Service {host!r}"
        return
    opened = next((entry for entry in service["spec"]["ports"] if entry["port"] == port), None)
    if opened is None:
        yield f"{workload.label}: {what}: {name_of(service)} has no port {port}"
        return
    for target in manifests.selected_by({"matchLabels": service["spec"]["selector"]}):
        number = target.port_number(opened["targetPort"])
        if number is not None and not is_allowed(manifests, workload, target, number):
            yield f"{workload.label}: {what}: the NetworkPolicies do not let it reach {target.label} at {number}"


def is_allowed(manifests: Manifests, source: Workload, destination: Workload, port: int) -> bool:
    """Whether the NetworkPolicies let pods of `source` reach TCP `port` of pods of `destination`."""
    policies = manifests.of_kind("NetworkPolicy")
    return _permits(policies, "egress", "to", source, destination, port) and _permits(
        policies, "ingress", "from", destination, source, port
    )


def _permits(
    policies: Iterable[Object], direction: str, peer_field: str, pods: Workload, peer: Workload, port: int
) -> bool:
    """The union of the rules that apply to `pods`; without any policy for this direction everything passes."""
    applying = [
        policy["spec"]
        for policy in policies
        if direction.capitalize() in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], pods.pod_labels)
    ]
    rules = [rule for spec in applying for rule in spec.get(direction, [])]
    return not applying or any(_rule_allows(rule, peer_field, peer, port) for rule in rules)


def _rule_allows(rule: Object, peer_field: str, peer: Workload, port: int) -> bool:
    ports = rule.get("ports")
    if ports is not None and not any(
        entry["port"] == port and entry.get("protocol", "TCP") == "TCP" for entry in ports
    ):
        return False
    peers = rule.get(peer_field)
    return peers is None or any(matches(selector, peer.pod_labels) for selector in local_selectors(peers))


def local_selectors(peers: Iterable[Object]) -> list[Object]:
    """Those of pods in the same namespace: no address ranges, no other namespaces."""
    return [peer["podSelector"] for peer in peers if "podSelector" in peer and "namespaceSelector" not in peer]
