"""What the phases of a compiled step are given. Memory is named by address; entry points take plain tuples of integers,
which are quicker to pass, and build these from them."""

from typing import Any, NamedTuple

import numba

from kernels.cpu.compiling import compiled
from kernels.cpu.problem import Layer, Problem, Scratch

ALIGNMENT = 64
"""Rows of quantized activations are padded to this many bytes."""


class Product(NamedTuple):
    """Quantized rows times packed weights; see `int8_matmul`."""

    values: int
    corrections: int
    scales: int
    bias: int  # 0: none
    num_outputs: int
    padded_depth: int


class StepShape(NamedTuple):
    num_threads: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    hadamard_block: int
    embedding: int  # [V, hidden] fp32
    cos: int  # [positions, head_dim / 2] fp32
    sin: int


class StepRows(NamedTuple):
    """The batch; T tokens, R rows of logits."""

    num_tokens: int
    token_ids: int  # [T] int64
    positions: int  # [T] int64
    slots: int  # [T] int64
    nonfinite: int  # [T] int32
    num_logits: int
    logit_rows: int  # [R] int64
    query_start: int
    context_lens: int
    block_tables: int
    table_width: int
    num_sequences: int


class StepBuffers(NamedTuple):
    """Memory of the step's own, for at least T rows."""

    residual: int  # [T, hidden] fp32
    quantized: int  # [T, K padded] uint8, of whatever the next product reads
    row_scales: int  # [T] fp32
    heads: int  # [T, (num_heads + 2 num_kv_heads) * head_dim] fp32
    queries: int  # [T, num_heads * head_dim] fp32, rotated
    attended: int  # the same shape
    gate_up: int  # [T, 2 * intermediate] fp32
    logits: int  # [R, V] fp32


class StepPlan(NamedTuple):
    """How the attention of all layers with one window is divided; see `plan`."""

    window: int
    units: int
    tasks: int
    num_tasks: int
    num_units: int
    slots: int  # partial results of split units
    num_slots: int


class Step(NamedTuple):
    shape: StepShape
    rows: StepRows
    buffers: StepBuffers
    eps: Any  # fp32
    attention_scale: Any  # fp32
    head: Product
    layers: int  # [num_layers, LAYER_COLUMNS] int64
    kv: Layer  # of the first layer
    plans: int  # [windows, len(StepPlan._fields)] int64
    scratch: Scratch  # this thread's own
    ticks: int  # of this thread's phases; 0: not wanted


_PRODUCT_COLUMNS = len(Product._fields)
# columns of a layer
QKV, OUTPUT, GATE_UP, DOWN = (_PRODUCT_COLUMNS * n for n in range(4))
Q_NORM, K_NORM, PLAN, KV_ADDRESSES = (_PRODUCT_COLUMNS * 4 + n for n in range(4))
LAYER_COLUMNS = KV_ADDRESSES + 4

SHAPE_FIELDS, ROWS_FIELDS, BUFFER_FIELDS, PRODUCT_FIELDS = (
    numba.types.UniTuple(numba.types.int64, len(kind._fields)) for kind in (StepShape, StepRows, StepBuffers, Product)
)
_PLAN_COLUMNS = len(StepPlan._fields)


@compiled
def product_at(layers: Any, at: int) -> Product:
    """The product whose columns start at `at`, in elements."""
    return Product(
        layers[at], layers[at + 1], layers[at + 2], layers[at + 3], layers[at + 4], layers[at + 5]
    )  # fmt: skip


@compiled
def plan_at(plans: Any, index: int) -> StepPlan:
    at = index * _PLAN_COLUMNS
    return StepPlan(
        plans[at], plans[at + 1], plans[at + 2], plans[at + 3], plans[at + 4], plans[at + 5], plans[at + 6]
    )  # fmt: skip


@compiled
def kv_layer(step: Step, layers: Any, layer: int) -> Layer:
    """All layers of a pool have the same strides; they differ in where they begin."""
    kv, at = step.kv, layer * LAYER_COLUMNS + KV_ADDRESSES
    return Layer(
        layers[at], layers[at + 1], kv.block_stride, kv.head_stride, kv.position_stride, layers[at + 2],
        layers[at + 3], kv.scale_block_stride, kv.scale_head_stride, kv.scale_position_stride, kv.num_blocks,
        kv.block_size, kv.num_kv_heads, kv.head_dim,
    )  # fmt: skip


@compiled
def attention_problem(step: Step, layers: Any, layer: int, window: int) -> Problem:
    rows, shape = step.rows, step.shape
    return Problem(
        kv_layer(step, layers, layer), step.attention_scale, step.buffers.queries, step.buffers.attended,
        shape.num_heads // shape.num_kv_heads, window, rows.query_start, rows.context_lens, rows.block_tables,
        rows.table_width, rows.num_sequences,
    )  # fmt: skip
