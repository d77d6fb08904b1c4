"""The objects of one kustomization, as the checks look at them: by name, by workload, with settings resolved."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from k8s.kustomize import POD_OWNERS, Object

_MULTIPLES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def quantity(text: str | int) -> float:
    """`500m`, `2`, `6Gi` as cores or bytes. Raises ValueError for what Kubernetes would not take."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _MULTIPLES:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _MULTIPLES[match[2]]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects `labels`. Knows matchLabels and `In`; ValueError for other operators."""
    for expression in selector.get("matchExpressions", []):
        if expression["operator"] != "In":
            raise ValueError(f"selector operator {expression['operator']!r} is not known here")
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet."""

    source: Object

    @property
    def name(self) -> str:
        return str(self.source["metadata"]["name"])

    @property
    def label(self) -> str:
        return f"{self.source['kind']}/{self.name}"

    @property
    def spec(self) -> Object:
        return self.source["spec"]

    @property
    def pod(self) -> Object:
        return self.source["spec"]["template"]["spec"]

    @property
    def pod_labels(self) -> dict[str, str]:
        return self.source["spec"]["template"]["metadata"].get("labels", {})

    @property
    def containers(self) -> list[Object]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def container_ports(self) -> dict[str, int]:
        return {
            port["name"]: port["containerPort"] for container in self.containers for port in container.get("ports", [])
        }

    def port_number(self, port: str | int) -> int | None:
        """A container port by name or number; None when the pod does not open it."""
        number = self.container_ports.get(port) if isinstance(port, str) else port
        return number if number in self.container_ports.values() else None


@dataclass(frozen=True, slots=True)
class Manifests:
    objects: list[Object]

    def of_kind(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def find(self, kind: str, name: str) -> Object | None:
        return next((found for found in self.of_kind(kind) if found["metadata"]["name"] == name), None)

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(found) for found in self.objects if found["kind"] in POD_OWNERS]

    def selected_by(self, selector: Mapping[str, Any]) -> list[Workload]:
        return [workload for workload in self.workloads if matches(selector, workload.pod_labels)]

    def environment(self, workload: Workload) -> dict[str, str]:
        """What its first pod's containers would see; a variable whose optional source is missing, or a Secret,
        is left out."""
        found: dict[str, str] = {}
        for container in workload.containers:
            for variable in container.get("env", []):
                value = self._value(workload, container, variable)
                if value is not None:
                    found[variable["name"]] = value
        return found

    def _value(self, workload: Workload, container: Object, variable: Object) -> str | None:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            return f"{workload.name}-0"
        if "resourceFieldRef" in source:
            field, resource = source["resourceFieldRef"]["resource"].split(".")
            amount = container.get("resources", {}).get(field, {}).get(resource)
            return f"{math.ceil(quantity(amount))}" if amount else None
        if "configMapKeyRef" not in source:
            return None  # a Secret's values are nobody's to read here
        reference = source["configMapKeyRef"]
        data = (self.find("ConfigMap", reference["name"]) or {}).get("data", {})
        return data.get(reference["key"])


def name_of(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


Problems = Iterator[str]
"""What a check yields: one line for each fault, starting with the object's name."""
