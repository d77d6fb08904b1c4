"""Threads that walk through the same phases of one job, in compiled code and without the interpreter's lock.

A phase is a number of tasks behind two counters: taken and done. Whoever comes takes the next task; a phase is left
when all its tasks are done. So a thread that joins late, or that the system puts aside between two tasks, delays no
other. Waiting spins for some microseconds and then gives the core to whoever can use it.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import simd
from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.simd import I32, index

COUNTERS_PER_PHASE = 32
"""int64 counters of a phase, zero at its start: `taken` and `done`, each alone in its pair of cache lines."""
_DONE = 16
_SPINS = 200
"""Spins before a waiting thread yields: about ten microseconds, more than most phases last."""
_IS_X86 = llvmlite.binding.get_process_triple().startswith(("x86_64", "i686"))


@intrinsic
def _finish(typing: Any, counter: Any) -> Any:
    """counter[0] += 1, later than every write before it."""
    return types.int64(counter), lambda context, builder, signature, args: builder.atomic_rmw(
        "add", args[0], index(1), "acq_rel"
    )


@intrinsic
def _observe(typing: Any, counter: Any) -> Any:
    """counter[0], earlier than every read after it."""
    return types.int64(counter), lambda context, builder, signature, args: builder.load_atomic(
        args[0], "acquire", align=8
    )


@intrinsic
def _pause(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _yield_core(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


@compiled
def take_task(counters: Any, phase: int) -> int:
    """The next task of a phase; at or beyond its number of tasks: none is left. `counters` points to int64 values,
    COUNTERS_PER_PHASE for each phase."""
    return simd.take_next(simd.ints64_at(counters, phase * COUNTERS_PER_PHASE))


@compiled
def finish_task(counters: Any, phase: int) -> None:
    _finish(simd.ints64_at(counters, phase * COUNTERS_PER_PHASE + _DONE))


@compiled
def await_phase(counters: Any, phase: int, num_tasks: int) -> None:
    """Returns when all tasks of the phase are done, and what they wrote can be read."""
    done = simd.ints64_at(counters, phase * COUNTERS_PER_PHASE + _DONE)
    spins = 0
    while _observe(done) < num_tasks:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _yield_core()


@intrinsic
def _cycles(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(simd.I64, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), emit


@compiled
def record_ticks(ticks: Any, kind: int) -> None:
    """Adds the processor's ticks since the last record, which ticks[0] keeps, to ticks[1 + kind]."""
    now = _cycles()
    ticks[1 + kind] += now - ticks[0]
    ticks[0] = now
