"""The compiled entry points of attention, with their signatures: importing this module compiles or loads them."""

from typing import Any

import numba
import numpy as np

from kernels.cpu import simd
from kernels.cpu.calls import call_with_fields_6
from kernels.cpu.compiling import entry_point
from kernels.cpu.plan import (
    NOT_SPLIT,
    SLOT,
    TASK_BEGIN,
    TASK_END,
    TASK_UNIT,
    plan_tasks,
    plan_units,
    split_units,
)
from kernels.cpu.problem import (
    LAYER_FIELDS,
    PROBLEM_FIELDS,
    Layer,
    Problem,
    flat_fields,
    lay_out_scratch,
    scratch_size,
    slot_size,
)

_F32, _I64 = numba.types.float32, numba.types.int64
_I64_ROWS, _COUNTER, _FLOATS = _I64[:, ::1], _I64[::1], _F32[::1]
_PLAN = numba.types.Tuple((_I64_ROWS, _I64_ROWS, _FLOATS, _I64))


@entry_point(_I64(LAYER_FIELDS, _F32, PROBLEM_FIELDS))
def first_bad_sequence(layer_fields: tuple[int, ...], scale: float, fields: tuple[int, ...]) -> int:
    """The first sequence whose context has a block id that is not in the pool, or -1."""
    problem = Problem(Layer(*layer_fields), scale, *fields)
    context_lens, tables = simd.ints32(problem.context_lens), simd.ints32(problem.block_tables)
    for s in range(problem.num_sequences):
        for i in range(-(-context_lens[s] // problem.layer.block_size)):
            if not 0 <= tables[s * problem.table_width + i] < problem.layer.num_blocks:
                return s
    return -1


@entry_point(_PLAN(LAYER_FIELDS, _F32, PROBLEM_FIELDS, _I64))
def plan_attention(layer_fields: tuple[int, ...], scale: float, fields: tuple[int, ...], num_workers: int) -> Any:
    """Units, tasks, memory for split units' partial results, and the work of all: query rows x positions."""
    problem = Problem(Layer(*layer_fields), scale, *fields)
    query_start, context_lens = simd.ints32(problem.query_start), simd.ints32(problem.context_lens)
    units, work = plan_units(
        query_start, context_lens, problem.num_sequences, problem.layer.num_kv_heads, problem.group_size, problem.window
    )
    num_slots = split_units(units, work, num_workers)
    slots = np.empty(num_slots * slot_size(problem), np.float32)
    return units, plan_tasks(units), slots, work.sum()


@entry_point(numba.types.void(_I64, LAYER_FIELDS, _F32, PROBLEM_FIELDS, _I64_ROWS, _I64_ROWS, _FLOATS, _COUNTER))
def run_attention_tasks(
    attend: int, layer_fields: tuple[int, ...], scale: float, fields: tuple[int, ...], units: Any, tasks: Any,
    slots: Any, next_task: Any,
) -> None:  # fmt: skip
    """Takes tasks until none is left; threads may share `next_task`, which starts at 0."""
    problem = Problem(Layer(*layer_fields), scale, *fields)
    counter = simd.ints64(next_task.ctypes.data)
    t = simd.take_next(counter)
    if t >= tasks.shape[0]:
        return
    memory = np.empty(scratch_size(problem), np.float32)
    lay_out_scratch(problem, memory.ctypes.data)
    flat, num_slots = flat_fields(layer_fields, scale, fields), slots.size // slot_size(problem)
    while t < tasks.shape[0]:
        call_with_fields_6(
            attend, flat, units[tasks[t, TASK_UNIT]].ctypes.data, tasks[t, TASK_BEGIN], tasks[t, TASK_END],
            memory.ctypes.data, slots.ctypes.data, num_slots,
        )  # fmt: skip
        t = simd.take_next(counter)
    simd.keep_alive(memory)


@entry_point(numba.types.void(_I64, LAYER_FIELDS, _F32, PROBLEM_FIELDS, _I64_ROWS, _FLOATS))
def finish_split_units(
    join: int, layer_fields: tuple[int, ...], scale: float, fields: tuple[int, ...], units: Any, slots: Any
) -> None:
    """After all tasks: joins the partitions of split units."""
    problem = Problem(Layer(*layer_fields), scale, *fields)
    memory = np.empty(scratch_size(problem), np.float32)
    lay_out_scratch(problem, memory.ctypes.data)
    flat, num_slots = flat_fields(layer_fields, scale, fields), slots.size // slot_size(problem)
    for i in range(units.shape[0]):
        if units[i, SLOT] != NOT_SPLIT:
            call_with_fields_6(join, flat, units[i].ctypes.data, 0, 0, memory.ctypes.data, slots.ctypes.data, num_slots)
    simd.keep_alive(memory)
