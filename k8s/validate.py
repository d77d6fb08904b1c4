"""Checks every kustomization and Dockerfile, with no cluster: `python -m k8s.validate`. Exit code 1 on any fault.

Schemas come from the package kubernetes-validate (the newest Kubernetes that it carries), rules for Dockerfiles from
hadolint.
"""

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate

from k8s.checks import ALL_CHECKS
from k8s.kustomize import Object, UnsupportedKustomization, build
from k8s.manifests import Manifests, name_of

ROOT = Path(__file__).resolve().parent
FOREIGN = frozenset({("cert-manager.io/v1", "Certificate"), ("cert-manager.io/v1", "Issuer")})
"""Kinds that an add-on defines: Kubernetes has no schema of them; `k8s.checks.tls` looks at what we rely on."""
KUBERNETES_VERSION = kubernetes_validate.latest_version()


def kustomizations() -> list[Path]:
    return [ROOT / "base", *sorted(path.parent for path in ROOT.glob("overlays/*/kustomization.yaml"))]


def dockerfiles() -> list[Path]:
    return sorted(ROOT.glob("images/*.Dockerfile"))


def validate(objects: list[Object]) -> list[str]:
    """Faults of a built kustomization. The checks need well-formed objects, so they follow a clean schema only."""
    return [fault for found in objects for fault in schema_faults(found)] or policy_faults(objects)


def policy_faults(objects: list[Object]) -> list[str]:
    return [fault for check in ALL_CHECKS for fault in check(Manifests(objects))]


def schema_faults(found: Object) -> list[str]:
    """Faults against the strict schema: unknown fields too."""
    if (found["apiVersion"], found["kind"]) in FOREIGN:
        return []
    try:
        kubernetes_validate.validate(found, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(str(part) for part in error.absolute_path)
        return [f"{name_of(found)}: {path or 'top level'}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{name_of(found)}: {error.message}"]
    return []


def lint_dockerfiles(paths: Iterable[Path]) -> list[str]:
    """hadolint's findings, one a line; its own absence is one."""
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not hadolint.exists():
        return [f"{hadolint} is missing: install the extra `dev`"]
    command = [str(hadolint), "--no-color", *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own files
    findings = (result.stdout + result.stderr).splitlines()
    return findings or ([f"hadolint exited with {result.returncode}"] if result.returncode else [])


def main() -> int:
    num_faults = 0
    for folder in kustomizations():
        label = folder.relative_to(ROOT.parent)
        try:
            objects = build(folder)
            faults = validate(objects)
        except UnsupportedKustomization as error:
            objects, faults = [], [str(error)]
        num_faults += len(faults)
        _report(f"{label}: {len(objects)} objects, Kubernetes {KUBERNETES_VERSION}, {len(ALL_CHECKS)} checks", faults)
    faults = lint_dockerfiles(dockerfiles())
    num_faults += len(faults)
    _report(f"k8s/images: {len(dockerfiles())} Dockerfiles", faults)
    return 1 if num_faults else 0


def _report(label: str, faults: list[str]) -> None:
    sys.stdout.write(f"{'FAIL' if faults else 'ok  '} {label}\n")
    sys.stdout.writelines(f"     {fault}\n" for fault in faults)


if __name__ == "__main__":
    raise SystemExit(main())
