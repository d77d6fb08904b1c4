"""The work of a step's phases, one task each. A task is a run of rows or of weight panels; how the whole is divided
decides who computes what, never how it is rounded.

`step` points to the fields of `step_fields`; `scratch` is the address of the thread's memory for attention.
"""

from typing import Any, NamedTuple

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
from kernels.cpu.quantize import norm_quantize_row, quantize_row
from kernels.cpu.rows import rms_norm_row, rope_head, silu_mul_row

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
def padded(size: int) -> int:
    """Bytes, up to whole lines of `step_fields.ALIGNMENT`."""
    return -(-size // f.ALIGNMENT) * f.ALIGNMENT


@compiled
def row_stride(width: int) -> int:
    """Bytes from a quantized row to the next: an odd number of lines, so that one place of many rows, which products
    read at once, is spread over the first cache."""
    return (-(-width // f.ALIGNMENT) | 1) * f.ALIGNMENT


@compiled
def float_row(address: int, row: int, width: int) -> Any:
    return simd.floats(address + 4 * row * width)


class QuantizedRows(NamedTuple):
    """Where rows go that the next product reads, by address."""

    values: int  # [rows, width padded] uint8
    scales: int  # [rows] fp32


@compiled
def all_rows(step: Any) -> QuantizedRows:
    return QuantizedRows(step[f.QUANTIZED], step[f.ROW_SCALES])


@compiled
def quantize(source: Any, width: int, factor: np.float32, rows: QuantizedRows, row: int) -> None:
    """`source` [width] becomes row `row` of `rows`, times `factor`."""
    target = simd.bytes_unsigned(rows.values + row * row_stride(width))
    simd.floats(rows.scales)[row] = quantize_row(source, width, target) * factor


@compiled
def norm_and_quantize_row(step: Any, source: Any, offset: int, rows: QuantizedRows, row: int) -> None:
    """`offset`: the address of what is taken off the normed row, or 0."""
    hidden = step[f.HIDDEN]
    target = simd.bytes_unsigned(rows.values + row * row_stride(hidden))
    scale = norm_quantize_row(source, offset, f.fp32_field(step, f.EPS), hidden, target)
    simd.floats(rows.scales)[row] = scale


@compiled
def embed(task: int, step: Any) -> None:
    hidden, tokens = step[f.HIDDEN], simd.ints64(step[f.TOKEN_IDS])
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        source, target = float_row(step[f.EMBEDDING], tokens[row], hidden), float_row(step[f.RESIDUAL], row, hidden)
        for i in range(hidden):
            target[i] = source[i]


@compiled
def norm_and_quantize(task: int, step: Any, layer: int, offset: int) -> None:
    """`offset`: the column of the layer that names the offset's address."""
    shift = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS)[offset]
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        norm_and_quantize_row(step, float_row(step[f.RESIDUAL], row, step[f.HIDDEN]), shift, all_rows(step), row)


@compiled
def norm_and_quantize_logit_rows(task: int, step: Any) -> None:
    wanted = simd.ints64(step[f.LOGIT_ROWS])
    begin, end = _row_range(step, task, step[f.NUM_LOGITS])
    for row in range(begin, end):
        source = float_row(step[f.RESIDUAL], wanted[row], step[f.HIDDEN])
        norm_and_quantize_row(step, source, step[f.HEAD_OFFSET], all_rows(step), row)


@compiled
def multiply(task: int, step: Any, product: Any, num_rows: int, width: int, output: int, adds: int) -> None:
    """Quantized rows of `width` values times a run of panels, to `output`; `adds` 1: added to what is there."""
    panels = -(-product[f.NUM_OUTPUTS] // PANEL_OUTPUTS)
    size = _panels_per_task(step, panels, num_rows)
    work = product_of(product, all_rows(step), num_rows, width, output, product[f.NUM_OUTPUTS], adds)
    multiply_panels(step[f.PRODUCT_KERNEL], work, task * size, min((task + 1) * size, panels))


@compiled
def product_of(
    columns: Any, rows: QuantizedRows, num_rows: int, width: int, output: int, output_stride: int, adds: int
) -> Product:
    return Product(
        rows.values, row_stride(width), rows.scales, num_rows, columns[f.VALUES], columns[f.CORRECTIONS],
        columns[f.SCALES], columns[f.NUM_OUTPUTS], columns[f.PADDED_DEPTH], columns[f.BIAS], output, output_stride,
        adds,
    )  # fmt: skip


@compiled
def rotate_and_write_kv(task: int, step: Any, layer: int) -> None:
    width = (step[f.NUM_HEADS] + 2 * step[f.NUM_KV_HEADS]) * step[f.HEAD_DIM]
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        rotate_and_write_row(step, layer, row, step[f.HEADS] + 4 * row * width)


@compiled
def rotate_and_write_row(step: Any, layer: int, row: int, heads: int) -> None:
    """`heads`: the address of the row's vectors of Q, K and V, one after the other."""
    columns = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS)
    head_dim, num_heads, num_kv_heads = step[f.HEAD_DIM], step[f.NUM_HEADS], step[f.NUM_KV_HEADS]
    eps, half, block = f.fp32_field(step, f.EPS), step[f.HEAD_DIM] // 2, step[f.HEAD_BLOCK]
    factor = np.float32(1.0 / np.sqrt(np.float64(block)))
    position, slot = simd.ints64(step[f.POSITIONS])[row], simd.ints64(step[f.SLOTS])[row]
    cos, sin = float_row(step[f.COS], position, half), float_row(step[f.SIN], position, half)
    for head in range(num_heads + num_kv_heads):
        source = float_row(heads, head, head_dim)
        norm = columns[f.Q_NORM] if head < num_heads else columns[f.K_NORM]
        if norm != 0:
            rms_norm_row(source, simd.floats(norm), eps, source, head_dim)
        # Keys go to where the row's attention output will be: nobody reads that until the row has attended.
        target, at = step[f.QUERIES], row * num_heads + head
        if head >= num_heads:
            target, at = step[f.ATTENDED], at - num_heads
        rotated = float_row(target, at, head_dim)
        rope_head(source, cos, sin, rotated, half)
        if block > 1:
            hadamard_in_place(rotated, head_dim, block)
            for i in range(head_dim):
                rotated[i] *= factor
        if head >= num_heads and columns[f.KEY_OFFSET] != 0:
            offset = float_row(columns[f.KEY_OFFSET], head - num_heads, head_dim)
            for i in range(head_dim):
                rotated[i] -= offset[i]
    keys = float_row(step[f.ATTENDED], row * num_heads, head_dim)
    values = float_row(heads, num_heads + num_kv_heads, head_dim)
    simd.ints32(step[f.NONFINITE])[row] += write_position(f.kv_layer(step, layer), slot, keys, values)


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
        quantize(float_row(step[f.ATTENDED], row, width), width, _ONE, all_rows(step), row)


@compiled
def gate_and_quantize(task: int, step: Any) -> None:
    begin, end = _row_range(step, task, step[f.NUM_TOKENS])
    for row in range(begin, end):
        gate_and_quantize_row(step, float_row(step[f.GATE_UP], row, 2 * step[f.INTERMEDIATE]), all_rows(step), row)


@compiled
def gate_and_quantize_row(step: Any, gate_up: Any, rows: QuantizedRows, row: int) -> None:
    """Destroys `gate_up` [2 * intermediate]."""
    silu_mul_row(gate_up, _ONE, gate_up, step[f.INTERMEDIATE])
    mix_and_quantize_row(step, gate_up, rows, row)


@compiled
def mix_and_quantize_row(step: Any, gated: Any, rows: QuantizedRows, row: int) -> None:
    """The Hadamard transform of `gated` [intermediate], which it destroys, is quantized."""
    width, block = step[f.INTERMEDIATE], step[f.HADAMARD_BLOCK]
    hadamard_in_place(gated, width, block)
    quantize(gated, width, np.float32(1.0 / np.sqrt(np.float64(block))), rows, row)
