"""The compiled entry points of a step, with their signatures: importing this module compiles or loads them."""

from typing import Any

import numba
import numpy as np

from kernels.cpu import simd
from kernels.cpu import step_work as work
from kernels.cpu.compiling import compiled, entry_point
from kernels.cpu.plan import plan_tasks, plan_units, split_units
from kernels.cpu.problem import LAYER_FIELDS, Layer, Problem, lay_out_scratch, scratch_size, slot_size
from kernels.cpu.step_fields import (
    BUFFER_FIELDS,
    PRODUCT_FIELDS,
    ROWS_FIELDS,
    SHAPE_FIELDS,
    Product,
    Step,
    StepBuffers,
    StepRows,
    StepShape,
)
from kernels.cpu.team import record_ticks, share

_F32, _I64 = numba.types.float32, numba.types.int64
_I64_ROWS, _COUNTERS = _I64[:, ::1], _I64[::1]

PHASE_NAMES = (
    "norm", "qkv", "rope and KV write", "attention", "join of split attention", "quantize", "output projection",
    "norm of the MLP", "gate and up", "SwiGLU, Hadamard, quantize", "down projection", "embedding", "gather", "head",
)  # fmt: skip
PHASES_PER_LAYER = 11
"""Then come those of the whole: embedding, gather and head."""
IDLE = len(PHASE_NAMES)


@entry_point(numba.types.Tuple((_I64_ROWS, _I64_ROWS, _I64))(ROWS_FIELDS, _I64, _I64, _I64, _I64))
def plan_step(rows_fields: tuple[int, ...], num_kv_heads: int, group_size: int, window: int, num_threads: int) -> Any:
    """Units, tasks and the number of slots for the attention of layers with this window."""
    rows = StepRows(*rows_fields)
    query_start, context_lens = simd.ints32(rows.query_start), simd.ints32(rows.context_lens)
    units, amounts = plan_units(query_start, context_lens, rows.num_sequences, num_kv_heads, group_size, window)
    num_slots = split_units(units, amounts, num_threads)
    return units, plan_tasks(units), num_slots


@compiled
def _problem(kv: Layer, rows: StepRows, shape: StepShape) -> Problem:
    """For the sizes that do not depend on the layer."""
    return Problem(
        kv, np.float32(1.0), 0, 0, shape.num_heads // shape.num_kv_heads, 0, rows.query_start, rows.context_lens,
        rows.block_tables, rows.table_width, rows.num_sequences,
    )  # fmt: skip


@entry_point(_I64(LAYER_FIELDS, ROWS_FIELDS, SHAPE_FIELDS))
def attention_scratch_size(kv_fields: tuple[int, ...], rows_fields: tuple[int, ...], shape_fields: tuple[int, ...]) -> int:
    """fp32 elements of one thread's memory."""
    return scratch_size(_problem(Layer(*kv_fields), StepRows(*rows_fields), StepShape(*shape_fields)))


@entry_point(_I64(LAYER_FIELDS, ROWS_FIELDS, SHAPE_FIELDS))
def attention_slot_size(kv_fields: tuple[int, ...], rows_fields: tuple[int, ...], shape_fields: tuple[int, ...]) -> int:
    """fp32 elements of one slot of a split unit."""
    return slot_size(_problem(Layer(*kv_fields), StepRows(*rows_fields), StepShape(*shape_fields)))


@compiled
def _phase(step: Step, counters: Any, phase: int, num_tasks: int, work: Any, layer: int) -> None:
    share(counters, phase, num_tasks, work, step, layer)
    if step.ticks != 0:
        in_layers = phase < step.shape.num_layers * PHASES_PER_LAYER
        kind = phase % PHASES_PER_LAYER if in_layers else phase - (step.shape.num_layers - 1) * PHASES_PER_LAYER
        record_ticks(simd.ints64(step.ticks), kind)


@compiled
def _run_layer(step: Step, counters: Any, layer: int) -> None:
    first = layer * PHASES_PER_LAYER
    by_rows = work.row_tasks(step, step.rows.num_tokens)
    by_hidden = work.panel_tasks(step, step.shape.hidden)
    by_gates = work.panel_tasks(step, 2 * step.shape.intermediate)
    _phase(step, counters, first, by_rows, work.norm_quantize, layer)
    _phase(step, counters, first + 1, work.num_qkv_tasks(step, layer), work.project_qkv, layer)
    _phase(step, counters, first + 2, by_rows, work.rotate_and_write_kv, layer)
    _phase(step, counters, first + 3, work.num_attention_tasks(step, layer), work.attend, layer)
    _phase(step, counters, first + 4, work.num_split_units(step, layer), work.finish_attention, layer)
    _phase(step, counters, first + 5, by_rows, work.quantize_attended, layer)
    _phase(step, counters, first + 6, by_hidden, work.project_output, layer)
    _phase(step, counters, first + 7, by_rows, work.norm_quantize, layer)
    _phase(step, counters, first + 8, by_gates, work.project_gate_up, layer)
    _phase(step, counters, first + 9, by_rows, work.gate_and_quantize, layer)
    _phase(step, counters, first + 10, by_hidden, work.project_down, layer)


@entry_point(
    numba.types.void(
        SHAPE_FIELDS, ROWS_FIELDS, BUFFER_FIELDS, PRODUCT_FIELDS, LAYER_FIELDS, _F32, _F32, _I64_ROWS, _I64_ROWS,
        _COUNTERS, _F32[:, ::1], _COUNTERS,
    )
)  # fmt: skip
def run_step(
    shape_fields: tuple[int, ...], rows_fields: tuple[int, ...], buffer_fields: tuple[int, ...],
    head_fields: tuple[int, ...], kv_fields: tuple[int, ...], eps: float, attention_scale: float, layers: Any,
    plans: Any, counters: Any, scratch: Any, ticks: Any,
) -> None:  # fmt: skip
    """One thread's share of a step. `counters` are zero when the first thread comes; the last of them numbers the
    threads, of which there may be as many as `scratch` has rows. `ticks`: see `PHASE_NAMES`, or empty."""
    thread = simd.take_next(simd.ints64(counters[-1:].ctypes.data))
    shape, rows, kv = StepShape(*shape_fields), StepRows(*rows_fields), Layer(*kv_fields)
    step = Step(
        shape, rows, StepBuffers(*buffer_fields), eps, attention_scale, Product(*head_fields), layers.ctypes.data,
        kv, plans.ctypes.data, lay_out_scratch(_problem(kv, rows, shape), scratch[thread].ctypes.data),
        ticks.ctypes.data if ticks.size and thread == 0 else 0,
    )  # fmt: skip
    shared = simd.ints64(counters.ctypes.data)
    first = shape.num_layers * PHASES_PER_LAYER
    if step.ticks != 0:
        record_ticks(simd.ints64(step.ticks), IDLE)
    _phase(step, shared, first, work.row_tasks(step, rows.num_tokens), work.embed, 0)
    for layer in range(shape.num_layers):
        _run_layer(step, shared, layer)
    if rows.num_logits:
        _phase(step, shared, first + 1, work.row_tasks(step, rows.num_logits), work.gather_logit_rows, 0)
        _phase(step, shared, first + 2, work.panel_tasks(step, step.head.num_outputs), work.project_head, 0)
