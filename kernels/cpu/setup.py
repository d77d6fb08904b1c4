"""Where numba keeps the compiled kernels. It reads the folder when a compiled module is imported, so that import must
happen inside `compiled_code_kept_in`; nothing compiles later."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import filelock
import numba

from kernels.cpu.code_folder import DONE, code_folder, must_compile

_IMPORT_LOCK = threading.Lock()
_LAST_COMPILED = "kernels.cpu.ops"
_COMPILED_APART = "kernels.cpu.attention_kernel"
_COMPILED_MEANWHILE = ("kernels.cpu.step_entry", "kernels.cpu.int8_matmul", "kernels.cpu.quantize")
"""Two halves of what there is to compile; neither needs the other's code."""


@contextmanager
def compiled_code_kept_in(cache_dir: Path | None) -> Iterator[None]:
    """Imports of compiled modules in here load their code from `cache_dir`, or compile it and keep it there.

    None: beside these sources. The first import in a process decides; later ones find the code in memory. Processes
    that start together wait for the first to compile. Raises ValueError where the folder cannot be written.
    """
    folder = code_folder(cache_dir)
    with _IMPORT_LOCK:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / "compile.lock")
            lock.acquire()
        except OSError as error:
            raise ValueError(
                f"compiled kernels cannot be kept in {folder} ({error}): name a writable folder"
            ) from error
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        is_in_memory = _LAST_COMPILED in sys.modules
        try:
            yield
            if not is_in_memory:  # else there may be no code in this folder
                (folder / DONE).touch()
        finally:
            numba.config.CACHE_DIR = before
            lock.release()


def compile_on_two_cores(cache_dir: Path | None) -> None:
    """Where nothing is compiled yet: half of it here, half in a process of its own, which leaves its code in the same
    folder. Should that one fail, the import that follows compiles what is missing, or says why it cannot.

    Precondition: inside `compiled_code_kept_in` with the same folder.
    """
    if _LAST_COMPILED in sys.modules or not must_compile(cache_dir):
        return
    script = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"import numba; numba.config.CACHE_DIR = {str(code_folder(cache_dir))!r}\n"
        f"import {_COMPILED_APART}"
    )
    command = [sys.executable, "-P", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as other:  # noqa: S603
        try:
            for module in _COMPILED_MEANWHILE:
                import_module(module)
        except BaseException:
            other.kill()
            raise
