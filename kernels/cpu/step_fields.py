"""What the phases of a compiled step are given: columns of int64 arrays, where memory is named by address.

One pointer to them costs little to pass and little to compile.
"""

from typing import Any

import numpy as np

from kernels.cpu import simd
from kernels.cpu.compiling import compiled
from kernels.cpu.problem import Layer, Problem, flat_fields

ALIGNMENT = 64
"""Rows of quantized activations are padded to this many bytes."""

(
    # the model
    NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE, HADAMARD_BLOCK, HEAD_BLOCK,
    EPS,  # the bits of a fp32 value
    ATTENTION_SCALE,  # as EPS
    EMBEDDING,  # [V, hidden] fp32
    COS, SIN,  # [positions, head_dim / 2] fp32
    LAYERS,  # [num_layers, LAYER_COLUMNS] int64
    HEAD,  # PRODUCT_COLUMNS int64
    HEAD_OFFSET,  # [hidden] fp32, or 0
    PRODUCT_KERNEL,  # for `multiply_panels`
    GATED_KERNEL,  # the same, for gated products of whole panels; 0: there is none
    ATTEND, JOIN,  # of `attention_kernel`
    KV,  # int64, as `Layer`: the first layer's
    # the batch: T tokens, R rows of logits
    NUM_THREADS,
    NUM_TOKENS,
    TOKEN_IDS, POSITIONS, SLOTS,  # [T] int64
    NONFINITE,  # [T] int32
    NUM_LOGITS,
    LOGIT_ROWS,  # [R] int64
    QUERY_START, CONTEXT_LENS, BLOCK_TABLES,  # as in `Problem`
    TABLE_WIDTH, NUM_SEQUENCES,
    PLANS,  # [windows, PLAN_COLUMNS] int64
    # memory of the step's own, for at least T rows
    RESIDUAL,  # [T, hidden] fp32
    QUANTIZED,  # [T, K padded] uint8, of whatever the next product reads
    ROW_SCALES,  # [T] fp32
    HEADS,  # [T, (num_heads + 2 num_kv_heads) * head_dim] fp32
    QUERIES,  # [T, num_heads * head_dim] fp32, rotated
    ATTENDED,  # the same shape
    GATE_UP,  # [T, 2 * intermediate] fp32
    LOGITS,  # [R, V] fp32
    NUM_BANDS,  # of rows, in which a long batch goes through a layer; 0: it goes in phases, each for all rows
    BAND_MEMORY,  # [threads, BAND_BYTES]
    BAND_BYTES,
    BAND_ROW_BYTES,  # of a quantized row
    NUM_FIELDS,
) = range(48)  # fmt: skip

# columns of a product; see `int8_matmul`
VALUES, CORRECTIONS, SCALES, BIAS, NUM_OUTPUTS, PADDED_DEPTH, PRODUCT_COLUMNS = range(7)
# columns of a layer: four products, then
QKV, OUTPUT, GATE_AND_UP, DOWN = (PRODUCT_COLUMNS * n for n in range(4))
(
    Q_NORM, K_NORM, KEY_OFFSET, ATTENTION_OFFSET, MLP_OFFSET,  # addresses, 0: none
    PLAN, KV_ADDRESSES,
) = (PRODUCT_COLUMNS * 4 + n for n in range(7))  # fmt: skip
LAYER_COLUMNS = KV_ADDRESSES + 4
# columns of a plan: how the attention of all layers with one window is divided; see `plan`
WINDOW, UNITS, NUM_UNITS, TASKS, NUM_TASKS, PARTIAL_SLOTS, NUM_SLOTS, PLAN_COLUMNS = range(8)


@compiled
def at(step: Any, array: int, index: int) -> Any:
    """A pointer into the int64 array that field `array` names."""
    return simd.ints64(step[array] + 8 * index)


@compiled
def fp32_field(step: Any, field: int) -> np.float32:
    return np.int32(step[field]).view(np.float32)


@compiled
def kv_layer(step: Any, layer: int) -> Layer:
    """All layers of a pool have the same strides; they differ in where they begin."""
    kv, addresses = simd.ints64(step[KV]), at(step, LAYERS, layer * LAYER_COLUMNS + KV_ADDRESSES)
    return Layer(
        addresses[0], addresses[1], kv[2], kv[3], kv[4], addresses[2], addresses[3], kv[7], kv[8], kv[9], kv[10],
        kv[11], kv[12], kv[13],
    )  # fmt: skip


@compiled
def attention_fields(step: Any, layer: int, window: int) -> Any:
    """As `problem.flat_fields`."""
    group_size = step[NUM_HEADS] // step[NUM_KV_HEADS]
    others = (
        step[QUERIES], step[ATTENDED], group_size, window, step[QUERY_START], step[CONTEXT_LENS], step[BLOCK_TABLES],
        step[TABLE_WIDTH], step[NUM_SEQUENCES],
    )  # fmt: skip
    return flat_fields(kv_layer(step, layer), fp32_field(step, ATTENTION_SCALE), others)


@compiled
def any_problem(step: Any) -> Problem:
    """For sizes, which do not depend on the layer."""
    group_size = step[NUM_HEADS] // step[NUM_KV_HEADS]
    return Problem(kv_layer(step, 0), np.float32(1.0), 0, 0, group_size, 0, 0, 0, 0, 0, 0)
