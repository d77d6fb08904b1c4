"""The compiled entry points of a step, with their signatures: importing this module compiles or loads them."""

from typing import Any

import numba

from kernels.cpu import simd
from kernels.cpu import step_bands as bands
from kernels.cpu import step_fields as f
from kernels.cpu import step_work as work
from kernels.cpu.compiling import compiled, entry_point
from kernels.cpu.plan import plan_tasks, plan_units, split_units
from kernels.cpu.problem import lay_out_scratch, scratch_size, slot_size
from kernels.cpu.team import await_phase, finish_task, record_ticks, take_task

_I64 = numba.types.int64
_I64_ROWS, _I64S = _I64[:, ::1], _I64[::1]

(
    NORM, QKV, ROTATE, BEFORE, ATTEND, JOIN, BETWEEN, QUANTIZE, OUTPUT, MLP_NORM, GATE_UP, GATE, DOWN, PHASES_PER_LAYER,
) = range(14)  # fmt: skip
"""The phases of a layer, in their order. Before them all comes EMBED, after them all GATHER and HEAD. BEFORE and
BETWEEN are for batches that go through a layer in bands of rows, ATTEND and JOIN for all, the others for the rest."""
EMBED, GATHER, HEAD, IDLE, NUM_KINDS = range(PHASES_PER_LAYER, PHASES_PER_LAYER + 5)
KIND_NAMES = (
    "norm, quantize", "qkv", "rope, KV write", "bands", "attention", "join split attention", "bands", "quantize",
    "output", "norm, quantize", "gate, up", "SwiGLU, Hadamard, quantize", "down", "embed", "norm, quantize", "head",
)  # fmt: skip


@entry_point(numba.types.Tuple((_I64_ROWS, _I64_ROWS, _I64))(_I64S, _I64))
def plan_step(fields: Any, window: int) -> Any:
    """Units, tasks and the number of slots for the attention of layers with this window."""
    step = simd.ints64(fields.ctypes.data)
    units, amounts = plan_units(
        simd.ints32(step[f.QUERY_START]), simd.ints32(step[f.CONTEXT_LENS]), step[f.NUM_SEQUENCES],
        step[f.NUM_KV_HEADS], step[f.NUM_HEADS] // step[f.NUM_KV_HEADS], window,
    )  # fmt: skip
    num_slots = split_units(units, amounts, step[f.NUM_THREADS])
    return units, plan_tasks(units), num_slots


@entry_point(numba.types.UniTuple(_I64, 2)(_I64S))
def attention_sizes(fields: Any) -> Any:
    """fp32 elements of one thread's memory, and of one slot of a split unit."""
    problem = f.any_problem(simd.ints64(fields.ctypes.data))
    return scratch_size(problem), slot_size(problem)


@compiled
def _is_skipped(kind: int, step: Any, layer: int) -> bool:
    if kind >= PHASES_PER_LAYER:
        return False
    if kind >= ATTEND and layer == step[f.NUM_LAYERS] - 1 and step[f.NUM_LOGITS] == 0:
        return True  # nobody reads what comes after the last layer's K and V
    if kind == BEFORE:
        return step[f.NUM_BANDS] == 0 or layer > 0  # what is before a later layer's attention is between two
    return kind not in (ATTEND, JOIN) and (kind == BETWEEN) != (step[f.NUM_BANDS] > 0)


@compiled
def _num_tasks(kind: int, step: Any, layer: int) -> int:
    columns, num_rows = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS), step[f.NUM_TOKENS]
    if _is_skipped(kind, step, layer):
        return 0
    if kind in (BEFORE, BETWEEN):
        return step[f.NUM_BANDS]
    if kind == QKV:
        return work.panel_tasks(step, columns[f.QKV + f.NUM_OUTPUTS], num_rows)
    if kind == ATTEND:
        return work.plan_of(step, layer)[f.NUM_TASKS]
    if kind == JOIN:
        plan = work.plan_of(step, layer)
        return plan[f.NUM_UNITS] if plan[f.NUM_SLOTS] else 0
    if kind in (OUTPUT, DOWN):
        return work.panel_tasks(step, step[f.HIDDEN], num_rows)
    if kind == GATE_UP:
        return work.panel_tasks(step, columns[f.GATE_AND_UP + f.NUM_OUTPUTS], num_rows)
    if kind == GATHER:
        return work.row_tasks(step, step[f.NUM_LOGITS])
    if kind == HEAD:
        num_logits, num_outputs = step[f.NUM_LOGITS], simd.ints64(step[f.HEAD])[f.NUM_OUTPUTS]
        return work.panel_tasks(step, num_outputs, num_logits) if num_logits else 0
    return work.row_tasks(step, step[f.NUM_TOKENS])


@compiled
def _multiply(kind: int, task: int, step: Any, layer: int) -> None:
    columns, num_rows = layer * f.LAYER_COLUMNS, step[f.NUM_TOKENS]
    width, output, adds = step[f.HIDDEN], step[f.RESIDUAL], 0
    if kind == QKV:
        product, output = f.at(step, f.LAYERS, columns + f.QKV), step[f.HEADS]
    elif kind == OUTPUT:
        product, width, adds = f.at(step, f.LAYERS, columns + f.OUTPUT), step[f.NUM_HEADS] * step[f.HEAD_DIM], 1
    elif kind == GATE_UP:
        product, output = f.at(step, f.LAYERS, columns + f.GATE_AND_UP), step[f.GATE_UP]
    elif kind == DOWN:
        product, width, adds = f.at(step, f.LAYERS, columns + f.DOWN), step[f.INTERMEDIATE], 1
    else:
        product, num_rows, output = simd.ints64(step[f.HEAD]), step[f.NUM_LOGITS], step[f.LOGITS]
    work.multiply(task, step, product, num_rows, width, output, adds)


@compiled
def _run_task(kind: int, task: int, step: Any, layer: int, thread: int, scratch: int) -> None:
    if kind in (NORM, MLP_NORM):
        work.norm_and_quantize(task, step, layer, f.ATTENTION_OFFSET if kind == NORM else f.MLP_OFFSET)
    elif kind == ROTATE:
        work.rotate_and_write_kv(task, step, layer)
    elif kind == ATTEND:
        work.attend(task, step, layer, scratch)
    elif kind in (BEFORE, BETWEEN):
        bands.run_band(task, step, layer, thread, kind == BETWEEN)
    elif kind == JOIN:
        work.join_split_unit(task, step, layer, scratch)
    elif kind == QUANTIZE:
        work.quantize_attended(task, step)
    elif kind == GATE:
        work.gate_and_quantize(task, step)
    elif kind == EMBED:
        work.embed(task, step)
    elif kind == GATHER:
        work.norm_and_quantize_logit_rows(task, step)
    else:
        _multiply(kind, task, step, layer)


@entry_point(numba.types.void(_I64S, _I64S, numba.types.float32[:, ::1], _I64S))
def run_step(fields: Any, counters: Any, scratch: Any, ticks: Any) -> None:
    """One thread's share of a step. `counters` are zero when the first thread comes; the last of them numbers the
    threads, of which there may be as many as `scratch` has rows. `ticks` [1 + NUM_KINDS] grows by the first thread's
    time; or it is empty."""
    thread = simd.take_next(simd.ints64(counters[-1:].ctypes.data))
    step, shared, memory = (
        simd.ints64(fields.ctypes.data),
        simd.ints64(counters.ctypes.data),
        scratch[thread].ctypes.data,
    )
    is_timed = ticks.size > 0 and thread == 0
    if is_timed:
        record_ticks(simd.ints64(ticks.ctypes.data), IDLE)
    lay_out_scratch(f.any_problem(step), memory)
    in_layers = step[f.NUM_LAYERS] * PHASES_PER_LAYER
    for phase in range(in_layers + 3):
        if phase == 0:
            kind, layer = EMBED, 0
        elif phase <= in_layers:
            kind, layer = (phase - 1) % PHASES_PER_LAYER, (phase - 1) // PHASES_PER_LAYER
        else:
            kind, layer = phase - 1 - in_layers + GATHER, 0
        num_tasks = _num_tasks(kind, step, layer)
        if num_tasks == 0:
            continue
        task = take_task(shared, phase)
        while task < num_tasks:
            _run_task(kind, task, step, layer, thread, memory)
            finish_task(shared, phase)
            task = take_task(shared, phase)
        await_phase(shared, phase, num_tasks)
        if is_timed:
            record_ticks(simd.ints64(ticks.ctypes.data), kind)
