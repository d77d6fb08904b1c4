"""`kernels.ops.select`: names, reasons for a refusal, and compiled code that outlives its process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.ops import select

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


def test_backends_by_name() -> None:
    assert select(CPU, "reference").name == "reference"
    ops = select(CPU)
    assert ops.name == "cpu"
    assert ops.description.startswith("cpu numba ")
    assert f"{torch.get_num_threads()} threads" in ops.description


def test_a_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(ValueError, match="'opencl' is unknown"):
        select(CPU, "opencl")
    with pytest.raises(ValueError, match="'cpu' cannot run on device meta"):
        select(torch.device("meta"), "cpu")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be kept in .*file"):
        select(CPU, "cpu", tmp_path / "file")


COMPILE_THE_KV_WRITE = """
import sys
from pathlib import Path
from kernels.cpu.setup import compiled_code_kept_in
with compiled_code_kept_in(Path(sys.argv[1])):
    from kernels.cpu.kv_write import write_kv_rows
print(sum(write_kv_rows.stats.cache_hits.values()), sum(write_kv_rows.stats.cache_misses.values()))
"""


def test_code_is_compiled_by_the_first_process_and_loaded_by_all_others(tmp_path: Path) -> None:
    """Two processes start at once and share one compilation; a third finds it done."""

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMPILE_THE_KV_WRITE, str(tmp_path)]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)

    at_once = [start(), start()]
    outputs = sorted(process.communicate(timeout=100)[0].strip() for process in at_once)
    assert outputs == ["0 1", "1 0"]
    assert start().communicate(timeout=100)[0].strip() == "1 0"


def test_compiled_modules_cannot_be_imported_elsewhere() -> None:
    """Numba would load what older versions of the sources left beside them."""
    command = [sys.executable, "-c", "import kernels.cpu.kv_write"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "ImportError: kernels.cpu must be imported inside kernels.cpu.setup.compiled_code_kept_in" in ended.stderr
