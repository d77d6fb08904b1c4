"""Where numba keeps the compiled kernels. It reads the folder when a compiled module is imported, so that import must
happen inside `compiled_code_kept_in`; nothing compiles later."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import numba

from kernels.cpu.code_folder import DONE, code_folder

_IMPORT_LOCK = threading.Lock()


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
        try:
            yield
            (folder / DONE).touch()
        finally:
            numba.config.CACHE_DIR = before
            lock.release()
