"""The kernels of paged INT8 attention, which keep one promise: a row's arithmetic is the same in every batch.

The context is cut at fixed absolute positions into partitions, each summed in order on its own, and the partitions are
folded in order from the first: by `fold_kernel` where each has a program of its own (short queries), else by the one
program that does them all. What a row does not see adds exact zeros. Operands are rounded to TF32 here (INT8 is exact
in it, a query goes in as two halves), so that no rounding of theirs is left to the tensor cores.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments get their types from Triton, when it compiles for them)

import triton
import triton.language as tl

PARTITION = tl.constexpr(256)
"""Positions of a partition. It is part of the arithmetic: another value changes the last bits."""

STEP = tl.constexpr(64)
"""Positions that one turn of the inner loop reads; a divisor of PARTITION, and part of the arithmetic too."""


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "num_splits", "split_rows", "window"])
def attend_kernel(
    q_ptr, layer, query_start_ptr, context_lens_ptr, block_tables_ptr, partials, out_ptr, q_token_stride, q_head_stride,
    table_stride, num_sequences, num_splits, split_rows, window, score_scale, group_size: tl.constexpr,
    lanes: tl.constexpr, tile_rows: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
    block_size: tl.constexpr,
):  # fmt: skip
    """One program per (tile of query rows, KV head, split); a lane is one query head of one row.

    `score_scale` has log2(e) folded in: weights are powers of two. out [T, Hq, D] and the partials are contiguous.
    """
    kv_head, split = tl.program_id(1), tl.program_id(2)
    sequence = _find_sequence(query_start_ptr, num_sequences, tl.program_id(0), tile_rows)
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    first_row = (tl.program_id(0) - (query_start // tile_rows + sequence)) * tile_rows
    is_split = (num_splits > 1) & (query_len <= tile_rows)
    if (first_row >= query_len) | (split >= tl.where(is_split, num_splits, 1)):
        return

    last_row = tl.minimum(first_row + tile_rows, query_len) - 1
    num_before = tl.load(context_lens_ptr + sequence) - query_len
    first_read = tl.maximum(num_before + first_row - window + 1, 0)
    last_read = num_before + last_row
    first_partition = tl.maximum(first_read // PARTITION, tl.where(is_split, split, 0))
    end_partition = tl.minimum(last_read // PARTITION + 1, tl.where(is_split, split + 1, num_splits))
    if first_partition >= end_partition:
        return

    lane = tl.arange(0, lanes)
    row = tl.minimum(first_row + lane // group_size, last_row)  # lanes past the end repeat it; they are not stored
    is_stored = lane < (last_row - first_row + 1) * group_size
    head = kv_head * group_size + lane % group_size
    token = query_start.to(tl.int64) + row
    dim = tl.arange(0, padded_dim)
    q_at = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=dim[None, :] < head_dim, other=0.0).to(tl.float32) * score_scale
    acc, row_max, row_sum = _attend_partitions(
        q, num_before + row, layer, kv_head, block_tables_ptr + sequence.to(tl.int64) * table_stride,
        first_partition, end_partition, first_read, last_read, window, head_dim, block_size,
    )  # fmt: skip

    is_value = is_stored[:, None] & (dim[None, :] < head_dim)
    num_heads = tl.num_programs(1) * group_size
    if is_split:
        partial_at = ((sequence.to(tl.int64) * split_rows + row) * num_heads + head) * num_splits + split
        tl.store(partials.max + partial_at, row_max, mask=is_stored)
        tl.store(partials.sum + partial_at, row_sum, mask=is_stored)
        tl.store(partials.acc + partial_at[:, None] * head_dim + dim[None, :], acc, mask=is_value)
    else:
        out_at = (token * num_heads + head)[:, None] * head_dim + dim[None, :]
        tl.store(out_ptr + out_at, acc / row_sum[:, None], mask=is_value)


@triton.jit(do_not_specialize=["num_splits", "split_rows", "window"])
def fold_kernel(
    partials, query_start_ptr, context_lens_ptr, out_ptr, num_splits, split_rows, window, num_heads: tl.constexpr,
    tile_rows: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, row, query head): folds the partitions that the row sees, from the first."""
    sequence, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    if (query_len > tile_rows) | (row >= query_len):
        return
    position = tl.load(context_lens_ptr + sequence) - query_len + row
    first_partition = tl.maximum(position - window + 1, 0) // PARTITION
    dim = tl.arange(0, padded_dim)
    is_dim = dim < head_dim
    partials_at = ((sequence.to(tl.int64) * split_rows + row) * num_heads + head) * num_splits
    acc = tl.zeros((padded_dim,), tl.float32)
    row_max = tl.full((), float("-inf"), tl.float32)
    row_sum = tl.full((), 0.0, tl.float32)
    for partition in range(first_partition, position // PARTITION + 1):
        at = partials_at + partition
        part_acc = tl.load(partials.acc + at * head_dim + dim, mask=is_dim, other=0.0)
        row_max, kept, added = _fold_weights(row_max, tl.load(partials.max + at))
        acc = acc * kept + part_acc * added
        row_sum = row_sum * kept + tl.load(partials.sum + at) * added
    out_at = ((query_start.to(tl.int64) + row) * num_heads + head) * head_dim
    tl.store(out_ptr + out_at + dim, acc / row_sum, mask=is_dim)


@triton.jit
def _attend_partitions(
    q, query_position, layer, kv_head, block_table_ptr, first_partition, end_partition, first_read, last_read, window,
    head_dim: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """(weighted sum of V, maximum, sum of weights) of each lane over these partitions, folded in their order."""
    q_high = _round_to_tf32(q)
    q_low = _round_to_tf32(q - q_high)
    acc = tl.zeros(q.shape, tl.float32)
    row_max = tl.full((q.shape[0],), float("-inf"), tl.float32)
    row_sum = tl.zeros((q.shape[0],), tl.float32)
    for partition in range(first_partition, end_partition):
        part_acc, part_max, part_sum = _attend_partition(
            q_high, q_low, query_position, layer, kv_head, block_table_ptr, partition * PARTITION, first_read,
            last_read, window, head_dim, block_size,
        )  # fmt: skip
        row_max, kept, added = _fold_weights(row_max, part_max)
        acc = acc * kept[:, None] + part_acc * added[:, None]
        row_sum = row_sum * kept + part_sum * added
    return acc, row_max, row_sum


@triton.jit
def _attend_partition(
    q_high, q_low, query_position, layer, kv_head, block_table_ptr, partition_start, first_read, last_read, window,
    head_dim: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """(weighted sum of V, maximum, sum of weights) of each lane over one partition; (0, -inf, 0) if it sees nothing.

    Reads positions first_read .. last_read only, scales included: what lies past them may be any bit pattern.
    """
    dim = tl.arange(0, q_high.shape[1])
    acc = tl.zeros(q_high.shape, tl.float32)
    row_max = tl.full((q_high.shape[0],), float("-inf"), tl.float32)
    row_sum = tl.zeros((q_high.shape[0],), tl.float32)
    start = tl.maximum(partition_start, first_read // STEP * STEP)
    for step_start in range(start, tl.minimum(partition_start + PARTITION, last_read + 1), STEP):
        position = step_start + tl.arange(0, STEP)
        is_read = (position >= first_read) & (position <= last_read)
        block = tl.load(block_table_ptr + position // block_size, mask=is_read, other=0).to(tl.int64)
        offset = position % block_size
        value_at = block * layer.block_stride + kv_head * layer.head_stride + offset * layer.position_stride
        scale_at = (
            block * layer.scale_block_stride + kv_head * layer.scale_head_stride + offset * layer.scale_position_stride
        )
        k_mask = (dim[:, None] < head_dim) & is_read[None, :]
        k = tl.load(layer.k + value_at[None, :] + dim[:, None], mask=k_mask, other=0).to(tl.float32)
        k_scale = tl.load(layer.k_scale + scale_at, mask=is_read, other=0.0).to(tl.float32)
        products = tl.dot(q_low, k, input_precision="tf32")
        products = tl.dot(q_high, k, products, input_precision="tf32")
        age = query_position[:, None] - position[None, :]
        is_seen = (age >= 0) & (age < window) & is_read[None, :]
        scores = tl.where(is_seen, products * k_scale[None, :], float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        pivot = _pivot(new_max)
        weights = tl.exp2(scores - pivot[:, None])
        kept = tl.exp2(row_max - pivot)
        row_sum = row_sum * kept + tl.sum(weights, axis=1)
        v_mask = is_read[:, None] & (dim[None, :] < head_dim)
        v = tl.load(layer.v + value_at[:, None] + dim[None, :], mask=v_mask, other=0).to(tl.float32)
        v_scale = tl.load(layer.v_scale + scale_at, mask=is_read, other=0.0).to(tl.float32)
        v_weights = _round_to_tf32(weights * v_scale[None, :])
        acc = tl.dot(v_weights, v, acc * kept[:, None], input_precision="tf32")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _fold_weights(old_max, part_max):
    """(new maximum, factor of what was there, factor of what comes in); they are 1 and 0 if only one saw anything."""
    new_max = tl.maximum(old_max, part_max)
    pivot = _pivot(new_max)
    return new_max, tl.exp2(old_max - pivot), tl.exp2(part_max - pivot)


@triton.jit
def _pivot(row_max):
    """The maximum to subtract before exp2: 0 where nothing was seen yet, since -inf minus -inf is not a number."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _round_to_tf32(x):
    """fp32 -> the nearest number of 11 significant bits, ties to even; NaN and Inf stay (their bits would carry)."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    return tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def _find_sequence(query_start_ptr, num_sequences, tile, tile_rows: tl.constexpr):
    """The sequence that owns `tile`, by bisection.

    Sequence s owns the tiles from query_start[s] // tile_rows + s to the next one's first, exclusive: at least as many
    as its rows need, and T // tile_rows + S in all.
    """
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_reached = tl.load(query_start_ptr + middle) // tile_rows + middle <= tile
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low
