import hashlib
import json
import os
from pathlib import Path

import pytest

from common.errors import ModelLoadError
from common.model.file_digest import file_sha256, remembered_sha256

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def later(path: Path) -> int:
    """A time at which the file's last change has settled."""
    return path.stat().st_ctime_ns + 10_000_000_000


def test_the_digest_is_that_of_the_content(file: Path, tmp_path: Path) -> None:
    assert file_sha256(file) == DIGEST
    assert remembered_sha256(file, tmp_path / "memo") == DIGEST


def test_an_unchanged_file_is_not_read_again(file: Path, tmp_path: Path) -> None:
    memo_folder = tmp_path / "memo"
    assert remembered_sha256(file, memo_folder, lambda: later(file)) == DIGEST
    (memo,) = memo_folder.iterdir()
    content = json.loads(memo.read_text())
    memo.write_text(json.dumps(content | {"sha256": "from memory"}))
    assert remembered_sha256(file, memo_folder, lambda: later(file)) == "from memory"


def test_a_change_that_keeps_size_and_modification_time_is_seen(file: Path, tmp_path: Path) -> None:
    memo_folder = tmp_path / "memo"
    remembered_sha256(file, memo_folder, lambda: later(file))
    before = file.stat()
    changed = CONTENT[::-1]
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
        file.write_bytes(changed)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert remembered_sha256(file, memo_folder) == hashlib.sha256(changed).hexdigest()


def test_a_replaced_file_is_seen(file: Path, tmp_path: Path) -> None:
    memo_folder = tmp_path / "memo"
    remembered_sha256(file, memo_folder, lambda: later(file))
    other = tmp_path / "other"
    other.write_bytes(b"other")
    other.replace(file)
    assert remembered_sha256(file, memo_folder) == hashlib.sha256(b"other").hexdigest()


def test_a_file_changed_a_moment_ago_is_not_remembered(file: Path, tmp_path: Path) -> None:
    remembered_sha256(file, tmp_path / "memo", lambda: file.stat().st_ctime_ns + 1)
    assert not (tmp_path / "memo").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"identity": 1}', b"\xff"])
def test_a_damaged_memory_is_ignored_and_mended(file: Path, tmp_path: Path, damage: bytes) -> None:
    memo_folder = tmp_path / "memo"
    remembered_sha256(file, memo_folder, lambda: later(file))
    (memo,) = memo_folder.iterdir()
    good = memo.read_bytes()
    memo.write_bytes(damage)
    assert remembered_sha256(file, memo_folder, lambda: later(file)) == DIGEST
    assert memo.read_bytes() == good


def test_a_file_that_grows_while_it_is_read_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(path: Path) -> str:
        with path.open("ab") as grown:
            grown.write(b"more")
        return DIGEST

    monkeypatch.setattr("common.model.file_digest.file_sha256", read_slowly)
    with pytest.raises(ModelLoadError, match="changed while it was read"):
        remembered_sha256(file, tmp_path / "memo")


def test_a_memory_that_cannot_be_written_costs_only_time(file: Path, tmp_path: Path) -> None:
    (tmp_path / "memo").write_text("a file where the folder should be")
    assert remembered_sha256(file, tmp_path / "memo", lambda: later(file)) == DIGEST


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.bin"):
        remembered_sha256(tmp_path / "absent.bin", tmp_path / "memo")
