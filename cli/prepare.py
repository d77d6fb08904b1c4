"""`twostroke prepare`: converts a model once into the form that services load, and says where it lies."""

import argparse
import sys

from cli.options import add_model_argument, add_numerics_argument
from cli.progress import Progress
from common.config import cache_dir
from kernels.cpu.code_folder import must_compile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_numerics_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    prepare(arguments.model, Progress(sys.stdout), arguments.numerics)
    return 0


def prepare(model: str, progress: Progress, numerics: str | None = None) -> str:
    """The model's name. Quick when it was prepared before; ModelLoadError when it cannot be served.

    Also what workers on the numeric path would make at their first start; None: the one that they would choose here.
    """
    import torch

    from common.model.linear import Numerics, auto_numerics
    from common.model.loading import prepare_model

    progress.step(f"preparing the model ({model})")
    with progress.reminder("still preparing the model"):
        prepared = prepare_model(model, cache_dir(), progress.step)
    progress.step(f"{prepared.name} is prepared in {prepared.folder}")
    numeric_path = Numerics(numerics) if numerics else auto_numerics("triton" if torch.cuda.is_available() else "cpu")
    if numeric_path is Numerics.INT8:
        from common.model.quantized_model import prepare_quantized

        progress.step(f"its int8 weights are in {prepare_quantized(prepared, cache_dir(), progress.step)}")
    if must_compile(cache_dir()):
        progress.step("the CPU kernels will be compiled for this machine (about 30 s, once)")
    return prepared.name
