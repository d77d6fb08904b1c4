"""SHA-256 of big files, remembered between starts and never served for a file that has changed since."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.errors import ModelLoadError
from common.model.config_json import canonical_json

_SETTLED_NS = 2_000_000_000
"""A file whose last change is younger is not remembered: a clock tick may hide a second change from its times."""


def file_sha256(path: Path) -> str:
    """Hex digest of the content. Raises ModelLoadError when the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error


def remembered_sha256(path: Path, memo_folder: Path, now_ns: Callable[[], int] = time.time_ns) -> str:
    """`file_sha256`, without reading the file again when its inode, size and times are those of the last call.

    The inode's change time is among them: unlike the modification time, no tool can set it back. Raises
    ModelLoadError when the file changes while it is read.
    """
    started_ns = now_ns()
    identity = _identity(path)
    memo = memo_folder / f"{hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()}.json"
    remembered = _recall(memo, identity)
    if remembered is not None:
        return remembered
    digest = file_sha256(path)
    if _identity(path) != identity:
        raise ModelLoadError(f"{path} changed while it was read; start again when it is complete")
    if started_ns - identity["ctime_ns"] > _SETTLED_NS:
        _remember(memo, identity, digest)
    return digest


def _identity(path: Path) -> dict[str, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _recall(memo: Path, identity: dict[str, int]) -> str | None:
    try:
        content = json.loads(memo.read_bytes())
    except (OSError, ValueError):  # absent or damaged: the file is read again
        return None
    if not isinstance(content, dict) or content.get("identity") != identity:
        return None
    digest = content.get("sha256")
    return digest if isinstance(digest, str) else None


def _remember(memo: Path, identity: dict[str, int], digest: str) -> None:
    # A cache that cannot be written costs another reading at the next start, and nothing else.
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary = memo.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(canonical_json({"identity": identity, "sha256": digest}))
        temporary.replace(memo)
