import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from common.errors import ModelLoadError
from common.model.model_cache import MANIFEST, entry_checksums, find_damage, open_or_build

KEY = "tiny-0123"


def build(folder: Path) -> None:
    (folder / "a.json").write_bytes(b"alpha")
    (folder / "b.bin").write_bytes(b"beta" * 100)


def forbidden(_folder: Path) -> None:
    pytest.fail("built again")


def silent(line: str) -> None:
    pytest.fail(f"unexpected progress: {line}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_entry_is_built_once_and_then_opened(tmp_path: Path) -> None:
    entry = open_or_build(tmp_path, KEY, build, silent)
    assert names(entry) == {"a.json", "b.bin", MANIFEST}
    assert set(entry_checksums(entry)) == {"a.json", "b.bin"}
    assert open_or_build(tmp_path, KEY, forbidden, silent) == entry


def change_one_byte(entry: Path) -> None:
    content = bytearray((entry / "b.bin").read_bytes())
    content[200] ^= 1
    (entry / "b.bin").write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte": (change_one_byte, "b.bin has another checksum"),
    "cut short": (lambda entry: (entry / "b.bin").write_bytes(b"beta"), "b.bin has another checksum"),
    "a missing file": (lambda entry: (entry / "a.json").unlink(), "its files are not those"),
    "a file too many": (lambda entry: (entry / "c").write_bytes(b""), "its files are not those"),
    "no manifest": (lambda entry: (entry / MANIFEST).unlink(), "is missing"),
    "an empty manifest": (lambda entry: (entry / MANIFEST).write_bytes(b""), "is not readable"),
    "a manifest of another kind": (lambda entry: (entry / MANIFEST).write_bytes(b"[]"), "is not readable"),
    "a checksum in the manifest": (
        lambda entry: (entry / MANIFEST).write_text('{"files":{"a.json":"00","b.bin":"00"}}'),
        "a.json has another checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_again_and_said_to_be(tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    entry = open_or_build(tmp_path, KEY, build, silent)
    harm(entry)
    lines: list[str] = []
    assert open_or_build(tmp_path, KEY, build, lines.append) == entry
    assert find_damage(entry) is None
    assert (entry / "b.bin").read_bytes() == b"beta" * 100
    assert len(lines) == 1
    assert "is damaged" in lines[0]
    assert reason in lines[0]
    assert names(tmp_path) == {KEY, f"{KEY}.lock"}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        build(folder)
        raise ModelLoadError("no such tensor")

    with pytest.raises(ModelLoadError, match="no such tensor"):
        open_or_build(tmp_path, KEY, fail, silent)
    assert names(tmp_path) <= {f"{KEY}.lock"}
    open_or_build(tmp_path, KEY, build, silent)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "b.bin"))

    with pytest.raises(ModelLoadError, match=r"cannot keep the prepared model.*No space left"):
        open_or_build(tmp_path, KEY, fail, silent)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelLoadError, match=rf"cannot keep the prepared model in {tmp_path}/models"):
        open_or_build(tmp_path / "models", KEY, build, silent)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from common.model.model_cache import open_or_build

def say(line):
    print(line, flush=True)

def build(folder):
    (folder / "a.json").write_bytes(b"alpha")
    say("building")
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)

open_or_build(Path(sys.argv[1]), "tiny-0123", build, say)
say("opened")
"""


def start(models: Path, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(models), what], stdout=subprocess.PIPE, text=True)


def test_what_a_killed_builder_leaves_is_not_taken_for_an_entry(tmp_path: Path) -> None:
    with start(tmp_path, "die") as killed:
        assert killed.wait(60) == -signal.SIGKILL
    assert any(name.startswith(f".{KEY}.") for name in names(tmp_path))
    assert not (tmp_path / KEY).exists()
    open_or_build(tmp_path, KEY, build, silent)
    assert names(tmp_path) == {KEY, f"{KEY}.lock"}


def test_of_two_processes_one_builds_and_the_other_waits_for_its_result(tmp_path: Path) -> None:
    # Both are held at the lock until both have come to it, so that they meet there however slowly they start.
    with FileLock(tmp_path / f"{KEY}.lock"):
        processes = [start(tmp_path, "live") for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == f"waiting for another process that prepares {KEY} ...\n"
    outputs = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert outputs == ["building\nopened\n", "opened\n"]
    assert [process.returncode for process in processes] == [0, 0]
