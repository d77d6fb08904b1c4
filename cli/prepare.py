"""`twostroke prepare`: converts a model once into the form that services load, and says where it lies."""

import argparse
import sys
from typing import TYPE_CHECKING

from cli.options import add_model_argument, add_numerics_argument
from cli.progress import Progress
from common.config import cache_dir
from kernels.cpu.code_folder import must_compile

if TYPE_CHECKING:
    from common.model.prepared import PreparedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_numerics_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    prepare(arguments.model, Progress(sys.stdout), arguments.numerics)
    return 0


def prepare(model: str, progress: Progress, numerics: str | None = None, *, verifies: bool = True) -> str:
    """The model's name. Quick when it was prepared before; ModelLoadError when it cannot be served.

    Also what workers on the numeric path would make at their first start; None: the one that they would choose here.
    Not `verifies`: int8 weights that are there count as they are, as workers verify what they load; this saves
    importing torch.
    """
    from common.model.loading import prepare_model
    from common.model.model_cache import has_entry

    progress.step(f"preparing the model ({model})")
    with progress.reminder("still preparing the model"):
        prepared = prepare_model(model, cache_dir(), progress.step)
    progress.step(f"{prepared.name} is prepared in {prepared.folder}")
    if must_compile(cache_dir()):
        progress.step("the CPU kernels will be compiled for this machine (about 30 s, once)")
    is_there = not verifies and has_entry(cache_dir() / "models", f"{prepared.name}-int8-")
    if numerics in (None, "int8") and not is_there:
        _prepare_int8(prepared, progress, numerics)
    return prepared.name


def _prepare_int8(prepared: "PreparedModel", progress: Progress, numerics: str | None) -> None:
    """Where workers would use int8 weights: makes them, or verifies those that are there."""
    import torch

    from common.model.linear import Numerics, auto_numerics
    from common.model.quantized_model import prepare_quantized

    numeric_path = Numerics(numerics) if numerics else auto_numerics("triton" if torch.cuda.is_available() else "cpu")
    if numeric_path is Numerics.INT8:
        with progress.reminder("still making the int8 weights"):
            folder = prepare_quantized(prepared, cache_dir(), progress.step)
        progress.step(f"its int8 weights are in {folder}")
