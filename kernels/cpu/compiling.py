"""How functions here are compiled: one place for numba's options, typed for the checker.

Never with fastmath: reordered sums would depend on the optimizer, and the KV write must round as it says.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numba
import numba.extending

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")


_FOR_COMPILED_CALLERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""A third less to compile: nothing but compiled code calls these."""


def _check_folder() -> None:
    """Beside the sources numba would load code of older versions: of all files it looks at one function's own."""
    if not numba.config.CACHE_DIR:
        raise ImportError("kernels.cpu must be imported inside kernels.cpu.setup.compiled_code_kept_in")


def compiled(function: Function) -> Function:
    """For functions that compiled code calls."""
    return numba.njit(**_FOR_COMPILED_CALLERS)(function)


def inlined(function: Function) -> Function:
    """Copied into its callers by LLVM: numba's own inlining, which copies before it infers types, takes far longer."""
    return numba.njit(forceinline=True, **_FOR_COMPILED_CALLERS)(function)


def entry_point(signature: Any) -> Callable[[Function], Function]:
    """What Python calls: compiled at import or loaded from disk, for this one signature, and run without the
    interpreter's lock. One signature to a function: numba's files of two could be mixed up by processes that write
    them at once. Raises ImportError outside `setup.compiled_code_kept_in`."""
    _check_folder()
    return numba.njit(signature, cache=True, nogil=True)


def called_by_address(num_arguments: int) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function of so many int64, or loads it; the result has an `address`. See `calls`."""
    _check_folder()
    signature = numba.types.void(*num_arguments * (numba.types.int64,))
    decorate: Callable[[Callable[..., None]], Any] = numba.cfunc(signature, cache=True)
    return decorate


def intrinsic(function: Callable[Concatenate[Any, Arguments], Any]) -> Callable[Arguments, Any]:
    """A function of (numba's typing context, argument types) that returns a signature and an emitter of LLVM IR; called
    from compiled code with the arguments alone."""
    return numba.extending.intrinsic(function)
