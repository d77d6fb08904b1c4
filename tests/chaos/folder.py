"""The folder of a run's logs: gone when the run passed, kept and named when it did not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp


def run_in_folder(name: str, run: Callable[[Path], bool]) -> int:
    """Says how `run` ended and returns the exit status. An exception passes through, and the folder stays."""
    folder = Path(mkdtemp(prefix=f"twostroke-{name}-"))
    has_passed = False
    try:
        has_passed = run(folder)
    finally:
        if has_passed:
            shutil.rmtree(folder)
        print(f"{name}: passed" if has_passed else f"{name}: FAILED; logs in {folder}", flush=True)
    return 0 if has_passed else 1
