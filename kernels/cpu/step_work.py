"""The work of a step's phases, one task each. A task is a run of rows or of weight panels; how the whole is divided
decides who computes what, never how it is rounded."""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.attention import finish_split_unit, run_task
from kernels.cpu.compiling import compiled
from kernels.cpu.hadamard import hadamard_in_place
from kernels.cpu.int8_matmul import PANEL, multiply_panels
from kernels.cpu.kv_write import write_position
from kernels.cpu.plan import NOT_SPLIT, SLOT, TASK_BEGIN, TASK_COLUMNS, TASK_END, TASK_UNIT, UNIT_COLUMNS, unit_rows
from kernels.cpu.problem import Problem, slot_pointers
from kernels.cpu.quantize import quantize_row
from kernels.cpu.rows import rms_norm_row, rope_head, silu_mul_row, sum_squares
from kernels.cpu.step_fields import (
    ALIGNMENT,
    DOWN,
    GATE_UP,
    K_NORM,
    LAYER_COLUMNS,
    OUTPUT,
    PLAN,
    Q_NORM,
    QKV,
    Product,
    Step,
    StepPlan,
    attention_problem,
    kv_layer,
    plan_at,
    product_at,
)

_ONE = np.float32(1.0)
_TASKS_PER_THREAD = 4
_PANELS_AT_ONCE = 4


@compiled
def row_tasks(step: Step, num_rows: int) -> int:
    return min(num_rows, step.shape.num_threads * _TASKS_PER_THREAD)


@compiled
def panel_tasks(step: Step, num_outputs: int) -> int:
    panels = -(-num_outputs // PANEL)
    return -(-panels // _panels_per_task(step, panels))


@compiled
def _panels_per_task(step: Step, panels: int) -> int:
    wanted = -(-panels // (step.shape.num_threads * _TASKS_PER_THREAD))
    return -(-wanted // _PANELS_AT_ONCE) * _PANELS_AT_ONCE


@compiled
def _row_range(step: Step, task: int, num_rows: int) -> Any:
    tasks = row_tasks(step, num_rows)
    return task * num_rows // tasks, (task + 1) * num_rows // tasks


@compiled
def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@compiled
def _quantized_row(step: Step, row: int, width: int) -> Any:
    return simd.bytes_unsigned(step.buffers.quantized + row * padded(width))


@compiled
def _float_row(buffer: int, row: int, width: int) -> Any:
    return simd.floats(buffer + 4 * row * width)


@compiled
def _norm_quantize_row(step: Step, source: Any, row: int) -> None:
    """`source` [hidden], normed, becomes quantized row `row`."""
    hidden = step.shape.hidden
    factor = _ONE / np.sqrt(sum_squares(source, hidden) / np.float32(hidden) + step.eps)
    scale = quantize_row(source, hidden, _quantized_row(step, row, hidden))
    simd.floats(step.buffers.row_scales)[row] = scale * factor


@compiled
def embed(task: int, step: Step, layer: int) -> None:
    hidden, tokens = step.shape.hidden, simd.ints64(step.rows.token_ids)
    begin, end = _row_range(step, task, step.rows.num_tokens)
    for row in range(begin, end):
        source = _float_row(step.shape.embedding, tokens[row], hidden)
        target = _float_row(step.buffers.residual, row, hidden)
        for i in range(hidden):
            target[i] = source[i]


@compiled
def norm_quantize(task: int, step: Step, layer: int) -> None:
    begin, end = _row_range(step, task, step.rows.num_tokens)
    for row in range(begin, end):
        _norm_quantize_row(step, _float_row(step.buffers.residual, row, step.shape.hidden), row)


@compiled
def _multiply(
    task: int, step: Step, product: Product, num_rows: int, width: int, output: int, output_width: int, adds: int
) -> None:
    """Quantized rows of `width` values times a run of panels, to `output`; `adds` 1: added to what is there."""
    panels = -(-product.num_outputs // PANEL)
    size = _panels_per_task(step, panels)
    first = task * size
    multiply_panels(
        step.buffers.quantized, padded(width), step.buffers.row_scales, num_rows, product.values,
        product.padded_depth, product.corrections, product.scales, product.bias, product.num_outputs,
        first, min(first + size, panels), output, output_width, adds,
    )  # fmt: skip


@compiled
def num_qkv_tasks(step: Step, layer: int) -> int:
    shape = step.shape
    return panel_tasks(step, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)


@compiled
def project_qkv(task: int, step: Step, layer: int) -> None:
    product = product_at(simd.ints64(step.layers), layer * LAYER_COLUMNS + QKV)
    heads = step.buffers.heads
    _multiply(task, step, product, step.rows.num_tokens, step.shape.hidden, heads, product.num_outputs, 0)


@compiled
def rotate_and_write_kv(task: int, step: Step, layer: int) -> None:
    shape, layers = step.shape, simd.ints64(step.layers)
    q_norm, k_norm = layers[layer * LAYER_COLUMNS + Q_NORM], layers[layer * LAYER_COLUMNS + K_NORM]
    head_dim, half = shape.head_dim, shape.head_dim // 2
    kv = kv_layer(step, layers, layer)
    positions, slots = simd.ints64(step.rows.positions), simd.ints64(step.rows.slots)
    nonfinite = simd.ints32(step.rows.nonfinite)
    num_vectors = shape.num_heads + 2 * shape.num_kv_heads
    begin, end = _row_range(step, task, step.rows.num_tokens)
    for row in range(begin, end):
        cos = _float_row(shape.cos, positions[row], half)
        sin = _float_row(shape.sin, positions[row], half)
        for head in range(shape.num_heads + shape.num_kv_heads):
            source = _float_row(step.buffers.heads, row * num_vectors + head, head_dim)
            if q_norm != 0:
                weight = q_norm if head < shape.num_heads else k_norm
                rms_norm_row(source, simd.floats(weight), step.eps, source, head_dim)
            # A key goes to where the row's attention output will be: nobody reads that until the row has attended.
            target = _float_row(step.buffers.queries, row * shape.num_heads + head, head_dim)
            if head >= shape.num_heads:
                at = row * shape.num_heads + head - shape.num_heads
                target = _float_row(step.buffers.attended, at, head_dim)
            rope_head(source, cos, sin, target, half)
        keys = _float_row(step.buffers.attended, row * shape.num_heads, head_dim)
        values = _float_row(step.buffers.heads, (row + 1) * num_vectors - shape.num_kv_heads, head_dim)
        nonfinite[row] += write_position(kv, slots[row], keys, values)


@compiled
def num_attention_tasks(step: Step, layer: int) -> int:
    return _plan(step, layer).num_tasks


@compiled
def num_split_units(step: Step, layer: int) -> int:
    """Units to look at for partial results; 0 where none is split."""
    plan = _plan(step, layer)
    return plan.num_units if plan.num_slots else 0


@compiled
def _plan(step: Step, layer: int) -> StepPlan:
    return plan_at(simd.ints64(step.plans), simd.ints64(step.layers)[layer * LAYER_COLUMNS + PLAN])


@compiled
def _slot_pointers(plan: StepPlan, problem: Problem) -> Any:
    return slot_pointers(plan.slots, plan.num_slots * unit_rows(problem.group_size))


@compiled
def attend(task: int, step: Step, layer: int) -> None:
    plan = _plan(step, layer)
    problem = attention_problem(step, simd.ints64(step.layers), layer, plan.window)
    columns = simd.ints64(plan.tasks + 8 * task * TASK_COLUMNS)
    unit = simd.ints64(plan.units + 8 * columns[TASK_UNIT] * UNIT_COLUMNS)
    slots = _slot_pointers(plan, problem)
    run_task(problem, unit, columns[TASK_BEGIN], columns[TASK_END], step.scratch, slots)


@compiled
def finish_attention(task: int, step: Step, layer: int) -> None:
    plan = _plan(step, layer)
    unit = simd.ints64(plan.units + 8 * task * UNIT_COLUMNS)
    if unit[SLOT] != NOT_SPLIT:
        problem = attention_problem(step, simd.ints64(step.layers), layer, plan.window)
        finish_split_unit(problem, unit, step.scratch, _slot_pointers(plan, problem))


@compiled
def quantize_attended(task: int, step: Step, layer: int) -> None:
    width = step.shape.num_heads * step.shape.head_dim
    begin, end = _row_range(step, task, step.rows.num_tokens)
    for row in range(begin, end):
        source = _float_row(step.buffers.attended, row, width)
        scale = quantize_row(source, width, _quantized_row(step, row, width))
        simd.floats(step.buffers.row_scales)[row] = scale


@compiled
def project_output(task: int, step: Step, layer: int) -> None:
    product = product_at(simd.ints64(step.layers), layer * LAYER_COLUMNS + OUTPUT)
    width = step.shape.num_heads * step.shape.head_dim
    _multiply(task, step, product, step.rows.num_tokens, width, step.buffers.residual, step.shape.hidden, 1)


@compiled
def project_gate_up(task: int, step: Step, layer: int) -> None:
    product = product_at(simd.ints64(step.layers), layer * LAYER_COLUMNS + GATE_UP)
    gate_up = step.buffers.gate_up
    _multiply(task, step, product, step.rows.num_tokens, step.shape.hidden, gate_up, product.num_outputs, 0)


@compiled
def gate_and_quantize(task: int, step: Step, layer: int) -> None:
    width, block = step.shape.intermediate, step.shape.hadamard_block
    factor = np.float32(1.0 / np.sqrt(np.float64(block)))
    begin, end = _row_range(step, task, step.rows.num_tokens)
    for row in range(begin, end):
        mixed = _float_row(step.buffers.gate_up, row, 2 * width)
        silu_mul_row(mixed, _ONE, mixed, width)
        hadamard_in_place(mixed, width, block)
        scale = quantize_row(mixed, width, _quantized_row(step, row, width))
        simd.floats(step.buffers.row_scales)[row] = scale * factor


@compiled
def project_down(task: int, step: Step, layer: int) -> None:
    product = product_at(simd.ints64(step.layers), layer * LAYER_COLUMNS + DOWN)
    residual, hidden = step.buffers.residual, step.shape.hidden
    _multiply(task, step, product, step.rows.num_tokens, step.shape.intermediate, residual, hidden, 1)


@compiled
def gather_logit_rows(task: int, step: Step, layer: int) -> None:
    wanted = simd.ints64(step.rows.logit_rows)
    begin, end = _row_range(step, task, step.rows.num_logits)
    for row in range(begin, end):
        _norm_quantize_row(step, _float_row(step.buffers.residual, wanted[row], step.shape.hidden), row)


@compiled
def project_head(task: int, step: Step, layer: int) -> None:
    num_outputs = step.head.num_outputs
    _multiply(task, step, step.head, step.rows.num_logits, step.shape.hidden, step.buffers.logits, num_outputs, 0)
