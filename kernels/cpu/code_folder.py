"""Names the folder of the compiled kernels; importable without numba, so that others can see whether it is there."""

import hashlib
from pathlib import Path

SOURCES = Path(__file__).parent
DONE = "complete"


def code_folder(cache_dir: Path | None) -> Path:
    """`cache_dir`/numba-<digest>; None: beside these sources. The digest is of all sources: numba would not see a
    change in a function that another file calls."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    return (cache_dir or SOURCES / "__pycache__") / f"numba-{digest.hexdigest()}"


def must_compile(cache_dir: Path | None) -> bool:
    """Whether the first import will compile, which takes some twenty seconds."""
    return not (code_folder(cache_dir) / DONE).exists()
