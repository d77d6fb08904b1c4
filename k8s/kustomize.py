"""Builds a kustomization the way `kubectl kustomize` does, for the few features that these manifests use.

Knows resources, components, images (newName, newTag) and patches (strategic merge, from files); everything else is
refused by name. A test compares the result with kubectl's own where kubectl is installed.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

_KNOWN_FIELDS = frozenset({"apiVersion", "kind", "resources", "components", "images", "patches"})
POD_OWNERS = frozenset({"Deployment", "StatefulSet"})
# Lists that Kubernetes merges by key; of the others, those named here are replaced whole.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
_ATOMIC_LISTS = frozenset({"tolerations", "args", "command", "accessModes"})


class UnsupportedKustomization(Exception):
    """A kustomization uses a feature outside the subset, or names something that is not there."""


def build(folder: Path) -> list[Object]:
    """The objects of the kustomization in `folder`. Raises UnsupportedKustomization, naming the file and the field."""
    return _apply(folder, [])


def _apply(folder: Path, inherited: list[Object]) -> list[Object]:
    file = folder / "kustomization.yaml"
    kustomization = _load_one(file)
    unknown = sorted(set(kustomization) - _KNOWN_FIELDS)
    if unknown:
        raise UnsupportedKustomization(f"{file}: field {unknown[0]!r} is outside the supported subset")
    objects = list(inherited)
    for entry in kustomization.get("resources", []):
        path = folder / entry
        objects += build(path) if path.is_dir() else _load_all(path)
    for entry in kustomization.get("components", []):
        objects = _apply(folder / entry, objects)
    for patch in kustomization.get("patches", []):
        _apply_patch(file, patch, objects)
    for image in kustomization.get("images", []):
        _apply_image(file, image, objects)
    return objects


def _load_all(path: Path) -> list[Object]:
    if not path.is_file():
        raise UnsupportedKustomization(f"{path}: no such file")
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _load_one(path: Path) -> Object:
    documents = _load_all(path)
    if len(documents) != 1:
        raise UnsupportedKustomization(f"{path}: expected one document, found {len(documents)}")
    return documents[0]


def _find(file: Path, objects: list[Object], kind: str, name: str) -> Object:
    for found in objects:
        if found["kind"] == kind and found["metadata"]["name"] == name:
            return found
    raise UnsupportedKustomization(f"{file}: patches {kind} {name!r}, which no resource defines")


def _apply_patch(file: Path, patch: Object, objects: list[Object]) -> None:
    if set(patch) != {"path"}:
        raise UnsupportedKustomization(f"{file}: a patch names its file with `path` and nothing else, not {patch}")
    path = file.parent / patch["path"]
    for document in _load_all(path):
        target = _find(file, objects, document["kind"], document["metadata"]["name"])
        _merge(target, document, str(path))


def _merge(target: Object, patch: Object, where: str) -> None:
    """Strategic merge: null deletes, mappings merge, lists merge by key or are replaced."""
    for key, value in patch.items():
        here = f"{where}: {key}"
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value, here)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            _merge_list(target.setdefault(key, []), value, _MERGE_KEYS[key], here)
        elif isinstance(value, list) and key not in _ATOMIC_LISTS:
            raise UnsupportedKustomization(f"{here}: how this list merges is not known here")
        else:
            target[key] = copy.deepcopy(value)


def _merge_list(target: list[Object], patch: list[Object], merge_key: str, where: str) -> None:
    """The patch's entries come first, then the target's others; a container sees no difference, a comparison does."""
    named = {entry[merge_key] for entry in patch}
    merged = []
    for entry in patch:
        found = next((old for old in target if old[merge_key] == entry[merge_key]), {})
        _merge(found, entry, f"{where}[{entry[merge_key]}]")
        merged.append(found)
    target[:] = merged + [old for old in target if old[merge_key] not in named]


def _apply_image(file: Path, image: Object, objects: list[Object]) -> None:
    unknown = sorted(set(image) - {"name", "newName", "newTag"})
    if unknown:
        raise UnsupportedKustomization(f"{file}: images field {unknown[0]!r} is outside the supported subset")
    pods = [found["spec"]["template"]["spec"] for found in objects if found["kind"] in POD_OWNERS]
    for pod in pods:
        for container in pod.get("initContainers", []) + pod["containers"]:
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
