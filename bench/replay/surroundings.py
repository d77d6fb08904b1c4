"""The hardware and versions of a run, as its report records them: neither host names nor paths."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("twostroke", "torch", "numpy", "numba", "httpx", "grpcio", "uvicorn")


def hardware() -> dict[str, object]:
    """Of the machine that the client runs on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "architecture": platform.machine(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Of this side's packages, and of the source where it is a checkout."""
    installed = {name: _version(name) for name in _PACKAGES} | {"source": source_revision()}
    return {"python": platform.python_version()} | {name: held for name, held in installed.items() if held is not None}


def source_revision() -> str | None:
    """Of the checkout that this module is part of, as `git describe` names it; None where it is none."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603  no input
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def model_label(model: str) -> str:
    """A model's name; of a path the last part alone."""
    return Path(model).name if model.startswith(("/", "~", ".")) else model


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _cpuinfo() -> list[str]:
    """Linux only; elsewhere nothing."""
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []
