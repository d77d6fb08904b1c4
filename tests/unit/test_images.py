"""The images: clean Dockerfiles, what runs in them, and that the gateway needs none of what its image leaves out."""

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from k8s.kustomize import build
from k8s.manifests import Manifests
from k8s.validate import ROOT, dockerfiles, lint_dockerfiles

REPOSITORY = ROOT.parent
SERVICES = {"gateway": "gateway", "prefill": "prefill_svc", "decode": "decode_svc"}
DOCKERFILES = pytest.mark.parametrize("name", SERVICES)

# Not in the gateway's image; "kernels" is, with the rest of the distribution, but it needs these.
LEFT_OUT = ("torch", "transformers", "triton", "numba", "safetensors", "gguf", "accelerate", "kernels")

IMPORT_GATEWAY = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LEFT_OUT!r}:
            raise ImportError(name + " is not in the gateway's image")

sys.meta_path.insert(0, Refuse())
import gateway.__main__
"""


def text(name: str) -> str:
    return (ROOT / "images" / f"{name}.Dockerfile").read_text()


def last(name: str, instruction: str) -> str:
    """The argument of the last such instruction: the one that holds for the image."""
    lines = [line for line in text(name).splitlines() if line.startswith(f"{instruction} ")]
    return lines[-1].removeprefix(f"{instruction} ")


def test_each_image_has_a_clean_dockerfile() -> None:
    assert {path.name for path in dockerfiles()} == {f"{name}.Dockerfile" for name in SERVICES}
    assert lint_dockerfiles(dockerfiles()) == []


def test_the_linter_finds_faults(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\n")
    (finding,) = lint_dockerfiles([tmp_path / "Dockerfile"])
    assert "DL3007" in finding


@DOCKERFILES
def test_runs_a_module_of_ours_as_the_user_of_the_manifests(name: str) -> None:
    entrypoint = json.loads(last(name, "ENTRYPOINT"))  # a JSON list: no shell between the service and its signals
    assert entrypoint == ["tini", "--", "python", "-m", SERVICES[name]]
    assert find_spec(f"{SERVICES[name]}.__main__") is not None
    pods = {found.name: found.pod for found in Manifests(build(ROOT / "base")).workloads}
    context = pods[f"twostroke-{name}"]["securityContext"]
    assert last(name, "USER") == f"{context['runAsUser']}:{context['runAsGroup']}"


@DOCKERFILES
def test_opens_the_port_of_the_manifests(name: str) -> None:
    (workload,) = (found for found in Manifests(build(ROOT / "base")).workloads if found.name == f"twostroke-{name}")
    assert int(last(name, "EXPOSE")) in workload.container_ports.values()


def test_the_workers_images_differ_in_the_service_alone() -> None:
    assert text("prefill").replace("prefill", "decode") == text("decode")


def test_the_build_context_holds_every_package_of_the_distribution() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    kept = {
        line.removeprefix("!") for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert packages | {"pyproject.toml", "constraints.txt", project["project"]["readme"]} == kept


def test_the_gateway_imports_nothing_that_its_image_leaves_out() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_GATEWAY], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
