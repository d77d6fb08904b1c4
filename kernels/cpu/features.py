"""What code may be compiled for here: one answer for all kernels."""

from numba.core.registry import cpu_target

_ENABLED = frozenset(
    feature[1:] for feature in cpu_target.target_context.codegen().magic_tuple()[2].split(",") if feature[:1] == "+"
)
"""What numba compiles for, and looks up its code on disk by: the CPU's, unless numba's settings say less."""


def has_feature(name: str) -> bool:
    """`name` is LLVM's: "avx512vnni", "amx-int8"."""
    return name in _ENABLED
