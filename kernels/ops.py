"""The public door to the operations: picks a backend once, at start-up."""

from pathlib import Path

import torch

from kernels.contract import Ops

__all__ = ["Ops", "select"]


def select(device: torch.device, backend: str = "auto", cache_dir: Path | None = None) -> Ops:
    """The operations for `device`. `backend`: "auto" (Triton on CUDA, compiled kernels on the CPU), "reference", "cpu"
    or "triton". Compiled CPU kernels are kept in `cache_dir`; None: beside their sources.

    Compiles or loads what the CPU backend needs, so that nothing compiles at a request. Raises ValueError, with the
    reason, for a backend that cannot run.
    """
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "cpu"
    if backend == "reference":
        from kernels.reference.ops import ReferenceOps

        return ReferenceOps()
    if backend == "cpu":
        return _cpu_ops(device, cache_dir)
    if backend == "triton":
        return _triton_ops(device)
    raise ValueError(f"kernel backend {backend!r} is unknown: choose auto, reference, cpu or triton")


def _cpu_ops(device: torch.device, cache_dir: Path | None) -> Ops:
    if device.type != "cpu":
        raise ValueError(f"kernel backend 'cpu' cannot run on device {device}: choose auto or triton")
    from kernels.cpu.setup import compile_on_two_cores, compiled_code_kept_in

    with compiled_code_kept_in(cache_dir):
        compile_on_two_cores(cache_dir)
        from kernels.cpu.ops import CpuOps
    return CpuOps()


def _triton_ops(device: torch.device) -> Ops:
    try:
        from kernels.triton.ops import TritonOps
    except ImportError as error:
        raise ValueError(
            f"kernel backend 'triton' needs the package triton, which cannot be imported: {error}"
        ) from error
    return TritonOps(device)
