"""The one seam to transformers: kept quiet and off-line, and its errors become ModelLoadError with the file's name.

Importing transformers takes seconds, so this is for preparing a model, not for opening a prepared one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelLoadError


@contextmanager
def transformers_seam(path: Path, doing: str) -> Iterator[None]:
    """Around every call of transformers, tokenizers and safetensors; `doing` completes "path: ... failed"."""
    try:
        from huggingface_hub.errors import StrictDataclassError
        from jinja2 import TemplateError
        from safetensors import SafetensorError
    except ImportError as error:
        raise ModelLoadError(f"{path}: {doing} needs a package that is not installed: {error}") from error
    try:
        with _quiet():
            yield
    except (
        StrictDataclassError,
        TemplateError,
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        ArithmeticError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{path}: {doing} failed: {type(error).__name__}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, no log lines, no progress bars; as it was afterwards."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_progress_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bars:
            logging.enable_progress_bar()
