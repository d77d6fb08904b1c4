"""The work of a step's phases, one task each. A task is a run of rows or of weight panels; how the whole is divided
decides who computes what, never how it is rounded.

`step` points to the fields of `step_fields`; `scratch` is the address of the thread's memory for attention.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu import step_fields as f
from kernels.cpu.calls import call_with_fields_6
from kernels.cpu.compiling import compiled
from kernels.cpu.hadamard import hadamard_in_place
from kernels.cpu.int8_pack import PANEL_OUTPUTS
from kernels.cpu.int8_product import Product, multiply_panels
from kernels.cpu.kv_write import write_position
from kernels.cpu.plan import NOT_SPLIT, SLOT, TASK_BEGIN, TASK_COLUMNS, TASK_END, TASK_UNIT, UNIT_COLUMNS
from kernels.cpu.quantize import quantize_row
from kernels.cpu.rows import rms_norm_row, rope_head, silu_mul_row, sum_squares

_ONE = np.float32(1.0)
_TASKS_PER_THREAD = 6
_FEW_ROWS, _PANELS_OF_FEW, _PANELS_OF_MANY = 8, 3, 4  # how many panels the kernels take at once


@compiled
def row_tasks(step: Any, num_rows: int) -> int:
    return min(num_rows, step[f.NUM_THREADS] * _TASKS_PER_THREAD)


@compiled
def panel_tasks(step: Any, num_outputs: int, num_rows: int) -> int:
    panels = -(-num_outputs // PANEL_OUTPUTS)
    return -(-panels // _panels_per_task(step, panels, num_rows))


@compiled
def _panels_per_task(step: Any, panels: int, num_rows: int) -> int:
    unit = _PANELS_OF_FEW if num_rows <= _FEW_ROWS else _PANELS_OF_MANY
    wanted = -(-panels // (step[f.NUM_THREADS] * _TASKS_PER_THREAD))
    return -(-wanted // unit) * unit


@compiled
def _row_range(step: Any, task: int, num_rows: int) -> Any:
    tasks = row_tasks(step, num_rows)
    return task * num_rows // tasks, (task + 1) * num_rows // tasks


@compiled
def _padded(size: int) -> int:
    return -(-size // f.ALIGNMENT) * f.ALIGNMENT


@compiled
def _float_row(address: int, row: int, width: int) -> Any:
    return simd.floats(address + 4 * row * width)


@compiled
def _quantize(step: Any, source: Any, row: int, width: int, factor: np.float32) -> None:
    """`source` [width] becomes quantized row `row`, times `factor`."""
    target = simd.bytes_unsigned(step[f.QUANTIZED] + row * _padded(width))
    simd.floats(step[f.ROW_SCALES])[row] = quantize_row(source, width, target) * factor


@compiled
def _norm_and_quantize(step: Any, source: Any, row: int) -> None:
    hidden = step[f.HIDDEN]
    variance = sum_squares(source, hidden) / np.float32(hidden)
    _quantize(step, source, row, hidden, _ONE / np.sqrt(variance + f.fp32_field(step, f.EPS)))


@compiled
def embed(task: int, step: Any) -> None:
    hidden, tokens = step[f.HIDDEN], simd.ints64(step[f.TOKEN_IDS])
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        source, target = _float_row(step[f.EMBEDDING], tokens[row], hidden), _float_row(step[f.RESIDUAL], row, hidden)
        for i in range(hidden):
            target[i] = source[i]


@compiled
def norm_and_quantize(task: int, step: Any) -> None:
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        _norm_and_quantize(step, _float_row(step[f.RESIDUAL], row, step[f.HIDDEN]), row)


@compiled
def norm_and_quantize_logit_rows(task: int, step: Any) -> None:
    wanted = simd.ints64(step[f.LOGIT_ROWS])
    begin, end = _row_range(step, task, step[f.NUM_LOGITS])
    for row in range(begin, end):
        _norm_and_quantize(step, _float_row(step[f.RESIDUAL], wanted[row], step[f.HIDDEN]), row)


@compiled
def multiply(task: int, step: Any, product: Any, num_rows: int, width: int, output: int, adds: int) -> None:
    """Quantized rows of `width` values times a run of panels, to `output`; `adds` 1: added to what is there."""
    num_outputs = product[f.NUM_OUTPUTS]
    panels = -(-num_outputs // PANEL_OUTPUTS)
    size = _panels_per_task(step, panels, num_rows)
    work = Product(
        step[f.QUANTIZED], _padded(width), step[f.ROW_SCALES], num_rows, product[f.VALUES], product[f.CORRECTIONS],
        product[f.SCALES], num_outputs, product[f.PADDED_DEPTH], product[f.BIAS], output, num_outputs, adds,
    )  # fmt: skip
    multiply_panels(step[f.PRODUCT_KERNEL], work, task * size, min((task + 1) * size, panels))


@compiled
def rotate_and_write_kv(task: int, step: Any, layer: int) -> None:
    columns = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS)
    head_dim, num_heads, num_kv_heads = step[f.HEAD_DIM], step[f.NUM_HEADS], step[f.NUM_KV_HEADS]
    kv, eps, half = f.kv_layer(step, layer), f.fp32_field(step, f.EPS), step[f.HEAD_DIM] // 2
    positions, slots, nonfinite = (
        simd.ints64(step[f.POSITIONS]),
        simd.ints64(step[f.SLOTS]),
        simd.ints32(step[f.NONFINITE]),
    )
    num_vectors, block = num_heads + 2 * num_kv_heads, step[f.HEAD_BLOCK]
    factor = np.float32(1.0 / np.sqrt(np.float64(block)))
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        cos, sin = _float_row(step[f.COS], positions[row], half), _float_row(step[f.SIN], positions[row], half)
        for head in range(num_heads + num_kv_heads):
            source = _float_row(step[f.HEADS], row * num_vectors + head, head_dim)
            norm = columns[f.Q_NORM] if head < num_heads else columns[f.K_NORM]
            if norm != 0:
                rms_norm_row(source, simd.floats(norm), eps, source, head_dim)
            # Keys go to where the row's attention output will be: nobody reads that until the row has attended.
            target, at = step[f.QUERIES], row * num_heads + head
            if head >= num_heads:
                target, at = step[f.ATTENDED], at - num_heads
            rotated = _float_row(target, at, head_dim)
            rope_head(source, cos, sin, rotated, half)
            if block > 1:
                hadamard_in_place(rotated, head_dim, block)
                for i in range(head_dim):
                    rotated[i] *= factor
        keys = _float_row(step[f.ATTENDED], row * num_heads, head_dim)
        values = _float_row(step[f.HEADS], (row + 1) * num_vectors - num_kv_heads, head_dim)
        nonfinite[row] += write_position(kv, slots[row], keys, values)


@compiled
def plan_of(step: Any, layer: int) -> Any:
    """A pointer to the columns of the layer's plan."""
    return f.at(step, f.PLANS, f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS)[f.PLAN] * f.PLAN_COLUMNS)


@compiled
def attend(task: int, step: Any, layer: int, scratch: int) -> None:
    plan = plan_of(step, layer)
    columns = simd.ints64(plan[f.TASKS] + 8 * task * TASK_COLUMNS)
    unit = plan[f.UNITS] + 8 * columns[TASK_UNIT] * UNIT_COLUMNS
    call_with_fields_6(
        step[f.ATTEND], f.attention_fields(step, layer, plan[f.WINDOW]), unit, columns[TASK_BEGIN], columns[TASK_END],
        scratch, plan[f.PARTIAL_SLOTS], plan[f.NUM_SLOTS],
    )  # fmt: skip


@compiled
def join_split_unit(task: int, step: Any, layer: int, scratch: int) -> None:
    plan = plan_of(step, layer)
    unit = plan[f.UNITS] + 8 * task * UNIT_COLUMNS
    if simd.ints64(unit)[SLOT] != NOT_SPLIT:
        call_with_fields_6(
            step[f.JOIN], f.attention_fields(step, layer, plan[f.WINDOW]), unit, 0, 0, scratch, plan[f.PARTIAL_SLOTS],
            plan[f.NUM_SLOTS],
        )  # fmt: skip


@compiled
def quantize_attended(task: int, step: Any) -> None:
    width = step[f.NUM_HEADS] * step[f.HEAD_DIM]
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        _quantize(step, _float_row(step[f.ATTENDED], row, width), row, width, _ONE)


@compiled
def gate_and_quantize(task: int, step: Any) -> None:
    width, block = step[f.INTERMEDIATE], step[f.HADAMARD_BLOCK]
    factor = np.float32(1.0 / np.sqrt(np.float64(block)))
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        mixed = _float_row(step[f.GATE_UP], row, 2 * width)
        silu_mul_row(mixed, _ONE, mixed, width)
        hadamard_in_place(mixed, width, block)
        _quantize(step, mixed, row, width, factor)
