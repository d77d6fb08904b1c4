"""Runs the checks of `triton_interpreted/` in Triton's interpreter, in a process of their own: triton reads
TRITON_INTERPRET when it is imported, and what is decorated then stays interpreted for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "triton_interpreted"
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_triton_kernels_in_the_interpreter() -> None:
    files = sorted(str(path) for path in CHECKS.glob("check_*.py"))
    assert files
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *files],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=230,
    )
    assert finished.returncode == 0, finished.stdout
