"""Where numba keeps the compiled kernels. It reads the folder when a compiled module is imported, so that import must
happen inside `compiled_code_kept_in`; nothing compiles later."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import numba

_SOURCES = Path(__file__).parent
_IMPORT_LOCK = threading.Lock()


@contextmanager
def compiled_code_kept_in(cache_dir: Path | None) -> Iterator[None]:
    """Imports of compiled modules in here load their code from `cache_dir`, or compile it and keep it there.

    None: beside these sources. The first import in a process decides; later ones find the code in memory. Processes
    that start together wait for the first to compile. Raises ValueError where the folder cannot be written.
    """
    folder = (cache_dir or _SOURCES / "__pycache__") / f"numba-{_sources_digest()}"
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
        finally:
            numba.config.CACHE_DIR = before
            lock.release()


def _sources_digest() -> str:
    """Names the code by all its sources: numba would not see a change in a function that another file calls."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
