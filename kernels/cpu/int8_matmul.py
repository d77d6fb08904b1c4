"""Exact products of quantized rows with packed int8 weights: which kernel this process uses, and its entry point.

Importing this module compiles or loads the chosen kernel. All kernels give the same bits.
"""

from importlib import import_module
from typing import Any

import numba

from kernels.cpu import simd
from kernels.cpu.amx import linux_grants_amx
from kernels.cpu.compiling import entry_point
from kernels.cpu.features import has_feature
from kernels.cpu.int8_product import PRODUCT_FIELDS, Product, multiply_panels

KERNELS = {
    "amx": "int8 by AMX and AVX-512 VNNI",
    "vnni": "int8 by AVX-512 VNNI",
    "plain": "int8 by plain vectors: this CPU has no AVX-512 VNNI",
}
"""The fastest first, described for logs."""

_I64 = numba.types.int64


def why_unusable(kernel: str) -> str | None:
    """The reason for which this process cannot run a kernel; None: it can."""
    if kernel != "plain" and not has_feature("avx512vnni"):
        return "no AVX-512 VNNI here"
    if kernel == "amx":
        if not has_feature("amx-int8"):
            return "no AMX here"
        if not linux_grants_amx():
            return "Linux does not grant AMX to this process"
    return None


def load_kernel(name: str) -> int:
    """The address of a kernel for `multiply_panels`. Compiles it if need be, so call it where compiled code is kept."""
    reason = why_unusable(name)
    if reason is not None:
        raise ValueError(f"int8 kernel {name!r} cannot run: {reason}")
    address: int = import_module(f"kernels.cpu.int8_{name}").multiply.address
    return address


def load_gated_kernel(name: str) -> int:
    """The address of a kernel for gated products (see `int8_amx_many`); 0: there is none."""
    if name != "amx":
        return 0
    address: int = import_module("kernels.cpu.int8_amx").multiply_gated.address
    return address


CHOSEN = next(name for name in KERNELS if why_unusable(name) is None)
CHOSEN_KERNEL = load_kernel(CHOSEN)
CHOSEN_GATED_KERNEL = load_gated_kernel(CHOSEN)


@entry_point(numba.types.void(_I64, PRODUCT_FIELDS, _I64, _I64, _I64[::1]))
def run_product_tasks(kernel: int, fields: tuple[int, ...], num_panels: int, task_panels: int, next_task: Any) -> None:
    """Takes tasks of `task_panels` panels until none is left; threads may share `next_task`, which starts at 0."""
    product = Product(*fields)
    counter = simd.ints64(next_task.ctypes.data)
    panel = simd.take_next(counter) * task_panels
    while panel < num_panels:
        multiply_panels(kernel, product, panel, min(panel + task_panels, num_panels))
        panel = simd.take_next(counter) * task_panels
