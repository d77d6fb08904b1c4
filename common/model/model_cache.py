"""The folder of prepared models: one entry per model, complete and checksummed, or not there at all.

    models/<key>/            an entry: its files and manifest.json, the SHA-256 of each
    models/<key>.lock        held by the process that builds the entry
    models/.<key>.<random>   an entry being built, or what a killed process left of one

An entry appears by a rename, after everything in it is on the disk. Knows nothing of what an entry holds.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import ModelLoadError
from common.model.config_json import canonical_json
from common.model.file_digest import file_sha256

MANIFEST = "manifest.json"
Progress = Callable[[str], None]


def entry_key(name: str, identity: Mapping[str, object]) -> str:
    """A folder name for what `identity` (as JSON) determines; `name` is for people."""
    digest = blake2b(canonical_json(identity), digest_size=16).hexdigest()
    return f"{_sanitized(name)}-{digest}"


def _sanitized(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "_" for c in name)


def has_entry(models: Path, beginning: str) -> bool:
    """Whether an entry's folder begins with the name `beginning`, sanitized as by `entry_key`; nothing is verified."""
    return any(path.is_dir() for path in models.glob(f"{_sanitized(beginning)}*"))


def open_or_build(models: Path, key: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """The entry's folder, its checksums verified just now. Where it is absent or damaged, `build` fills a new one.

    Of several processes one builds and the others wait and use its result. Raises ModelLoadError when the cache cannot
    be written, and whatever `build` raises; neither leaves an entry.
    """
    entry = models / key
    if find_damage(entry) is None:
        return entry
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _sole_builder(models, key, progress):
            damage = find_damage(entry)
            if damage is None:
                return entry
            if entry.exists():
                progress(f"the cached model {entry} is damaged ({damage}): building it again")
            _build_entry(models, key, build)
    except OSError as error:
        raise ModelLoadError(f"cannot keep the prepared model in {models}: {error}") from error
    return entry


def find_damage(entry: Path) -> str | None:
    """What is wrong with the entry's files, or None when each is there with its checksum. Reads every byte."""
    try:
        files = json.loads((entry / MANIFEST).read_bytes())["files"]
        present = {path.name for path in entry.iterdir()} - {MANIFEST}
    except OSError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    if not isinstance(files, dict) or set(files) != present:
        return f"its files are not those that {MANIFEST} names"
    return next((f"{name} has another checksum" for name in sorted(files) if _differs(entry / name, files[name])), None)


def entry_checksums(entry: Path) -> dict[str, str]:
    """File name -> SHA-256 (hex). Precondition: `open_or_build` returned this entry."""
    return json.loads((entry / MANIFEST).read_bytes())["files"]


def _differs(path: Path, expected: object) -> bool:
    try:
        return file_sha256(path) != expected
    except ModelLoadError:  # unreadable counts as damaged
        return True


@contextmanager
def _sole_builder(models: Path, key: str, progress: Progress) -> Iterator[None]:
    # The operating system frees the lock of a killed process, so that nobody waits for the dead.
    lock = FileLock(models / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that prepares {key} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_entry(models: Path, key: str, build: Callable[[Path], None]) -> None:
    """Precondition: this process is the sole builder of `key`, so any unfinished folder of it is a dead process's."""
    for leftover in models.glob(f".{key}.*"):
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=models))
    try:
        build(staging)
        _seal(staging)
        _replace(models / key, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Writes the manifest and brings every file to the disk."""
    checksums = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_bytes(canonical_json({"files": checksums}))
    for path in folder.iterdir():
        path.chmod(0o644)  # some writers make files private; services may run as other users of the same cache
        _fsync(path)
    folder.chmod(0o755)
    _fsync(folder)


def _replace(entry: Path, staging: Path) -> None:
    if entry.exists():
        # A folder cannot be renamed over one with content; the damaged one leaves first.
        discarded = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
        entry.rename(discarded / "damaged")
        staging.rename(entry)
        shutil.rmtree(discarded)
    else:
        staging.rename(entry)
    _fsync(entry.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
