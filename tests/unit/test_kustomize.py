"""k8s.kustomize: the subset is built as kubectl builds it, and what lies outside is refused by name."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.kustomize import Object, UnsupportedKustomization, build
from k8s.validate import kustomizations

KUBECTL = shutil.which("kubectl")


def write(folder: Path, **files: str) -> Path:
    """`kustomization=...` becomes kustomization.yaml, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


DEPLOYMENT = """
kind: Deployment
metadata: {name: web}
spec:
  template:
    spec:
      containers:
        - name: web
          image: web:1
          env:
            - {name: A, value: "1"}
            - {name: B, value: "2"}
      tolerations: [{key: old}]
      volumes:
        - name: data
          persistentVolumeClaim: {claimName: data}
"""


def patched(tmp_path: Path, patch: str) -> Object:
    write(tmp_path / "base", kustomization="resources: [web.yaml]", web=DEPLOYMENT)
    overlay = write(
        tmp_path / "overlay", kustomization="resources: [../base]\npatches: [{path: patch.yaml}]", patch=patch
    )
    (found,) = build(overlay)
    return found["spec"]["template"]["spec"]


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is absent: our builder is not compared with `kubectl kustomize`")
@pytest.mark.parametrize("folder", kustomizations(), ids=lambda folder: folder.name)
def test_builds_what_kubectl_builds(folder: Path) -> None:
    rendered = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, check=True, text=True)

    def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
        return {(found["kind"], found["metadata"]["name"]): found for found in objects}

    assert by_name(build(folder)) == by_name(list(yaml.safe_load_all(rendered.stdout)))


def test_merges_entries_of_lists_by_name(tmp_path: Path) -> None:
    pod = patched(
        tmp_path,
        "kind: Deployment\nmetadata: {name: web}\n"
        "spec: {template: {spec: {containers: [{name: web, env: [{name: B, value: '3'}, {name: C, value: '4'}]}]}}}",
    )
    (container,) = pod["containers"]
    assert container["image"] == "web:1"
    assert {entry["name"]: entry["value"] for entry in container["env"]} == {"A": "1", "B": "3", "C": "4"}


def test_null_deletes_and_atomic_lists_are_replaced(tmp_path: Path) -> None:
    pod = patched(
        tmp_path,
        "kind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {tolerations: [{key: new}], "
        "volumes: [{name: data, persistentVolumeClaim: null, emptyDir: {}}]}}}",
    )
    assert pod["volumes"] == [{"name": "data", "emptyDir": {}}]
    assert pod["tolerations"] == [{"key": "new"}]


def test_components_change_what_the_overlay_gathered(tmp_path: Path) -> None:
    write(tmp_path / "base", kustomization="resources: [web.yaml]", web=DEPLOYMENT)
    write(tmp_path / "component", kustomization="images: [{name: web, newName: registry:5000/web, newTag: '2'}]")
    overlay = write(tmp_path / "overlay", kustomization="resources: [../base]\ncomponents: [../component]")
    (found,) = build(overlay)
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == "registry:5000/web:2"


@pytest.mark.parametrize(
    ("kustomization", "fault"),
    [
        ("namePrefix: x-", "field 'namePrefix' is outside"),
        ("resources: [absent.yaml]", "absent.yaml: no such file"),
        ("images: [{name: web, digest: abc}]", "images field 'digest' is outside"),
        ("patches: [{patch: '[]', target: {kind: Deployment}}]", "a patch names its file"),
        ("resources: [web.yaml]\npatches: [{path: nobody.yaml}]", "patches Deployment 'nobody', which no resource"),
        ("resources: [web.yaml]\npatches: [{path: unknown-list.yaml}]", "how this list merges is not known"),
    ],
)
def test_refuses_what_it_does_not_know(tmp_path: Path, kustomization: str, fault: str) -> None:
    folder = write(tmp_path, kustomization=kustomization, web=DEPLOYMENT)
    write(folder, nobody="kind: Deployment\nmetadata: {name: nobody}")
    write(folder, **{"unknown-list": "kind: Deployment\nmetadata: {name: web}\nspec: {things: [1]}"})
    with pytest.raises(UnsupportedKustomization, match=fault):
        build(folder)


def test_refuses_a_folder_without_kustomization(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedKustomization, match=r"kustomization\.yaml: no such file"):
        build(tmp_path)
