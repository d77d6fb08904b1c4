"""What commands take from the environment, and the environment that the services they start are given."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from common.config import state_dir
from common.telemetry.span_file import spans_folder


def service_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's environment, with thread settings where the caller chose none.

    Every engine may use all cores: they are rarely busy at the same moment. OpenMP threads that spin while waiting
    make two busy processes several times slower than one thread each; a short spin keeps the lone case fast too.
    """
    chosen_here = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "GOMP_SPINCOUNT": "5000",
        "GRPC_VERBOSITY": "ERROR",  # gRPC's core writes of every peer that goes; the services log what matters
        "PYTHONUNBUFFERED": "1",  # so that a log's end is there when its service dies
    }
    return {**chosen_here, **environ}


def run_dir(port: int) -> Path:
    """Logs of the stack whose gateway listens on `port`."""
    return state_dir() / f"run-{port}"


def spans_dir() -> Path:
    return spans_folder(state_dir())


def wants_colour(out: TextIO) -> bool:
    """Colour for people who did not refuse it (see no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR")
