"""Paged INT8 attention: its launch. The kernels, and the promise that they keep, are in `attention_kernels`."""

import math
from typing import NamedTuple

import torch
import triton

from kernels.batch import AttentionBatch, KVLayerView
from kernels.triton.attention_kernels import PARTITION, attend_kernel, fold_kernel
from kernels.triton.layer import layer_argument

NO_WINDOW = 1 << 30

# No fused multiply-add: the two kernels fold in the same way only if every operation rounds on its own.
ATTEND_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
FOLD_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


class Partials(NamedTuple):
    """What the programs of a split context leave for the fold, fp32: row s * split_rows + r is row r of sequence s."""

    acc: torch.Tensor  # [S * split_rows, Hq, num_splits, D] weighted sums of V
    max: torch.Tensor  # [S * split_rows, Hq, num_splits] greatest scores
    sum: torch.Tensor  # [S * split_rows, Hq, num_splits] sums of weights


def paged_attention(
    q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
) -> torch.Tensor:
    """See `Ops.paged_attention`. Raises ValueError for an unquantized layer."""
    assert q.stride(-1) == 1
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = layer.k.shape[1]
    constants = attend_constants(num_heads // num_kv_heads, head_dim, layer.block_size)
    tile_rows = constants["tile_rows"]
    num_splits = -(-batch.max_context_len // PARTITION.value)
    split_rows = min(batch.max_query_len, tile_rows)  # most rows of a sequence whose context is split
    window = window or NO_WINDOW
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    partials = _new_partials(batch.num_sequences * split_rows, num_heads, num_splits, head_dim, q.device)
    num_tiles = num_tokens // tile_rows + batch.num_sequences  # see _find_sequence
    attend_kernel[(num_tiles, num_kv_heads, num_splits)](
        q, layer_argument(layer), batch.query_start, batch.context_lens, batch.block_tables, partials, out,
        q.stride(0), q.stride(1), batch.block_tables.stride(0), batch.num_sequences, num_splits, split_rows, window,
        scale * math.log2(math.e), **constants, **ATTEND_OPTIONS,
    )  # fmt: skip
    if num_splits > 1:
        fold_kernel[(batch.num_sequences, split_rows, num_heads)](
            partials, batch.query_start, batch.context_lens, out, num_splits, split_rows, window,
            **fold_constants(num_heads, tile_rows, head_dim), **FOLD_OPTIONS,
        )  # fmt: skip
    return out


def attend_constants(group_size: int, head_dim: int, block_size: int) -> dict[str, int]:
    """What `attend_kernel` is compiled for. Nothing here may depend on the batch: a row's arithmetic must not."""
    lanes = max(16, triton.next_power_of_2(group_size))  # 16: the least that a tensor core takes
    return {
        "group_size": group_size,
        "lanes": lanes,
        "tile_rows": lanes // group_size,
        "head_dim": head_dim,
        "padded_dim": _padded_dim(head_dim),
        "block_size": block_size,
    }


def fold_constants(num_heads: int, tile_rows: int, head_dim: int) -> dict[str, int]:
    """What `fold_kernel` is compiled for."""
    return {
        "num_heads": num_heads,
        "tile_rows": tile_rows,
        "head_dim": head_dim,
        "padded_dim": _padded_dim(head_dim),
    }


def _padded_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _new_partials(num_rows: int, num_heads: int, num_splits: int, head_dim: int, device: torch.device) -> Partials:
    """Uninitialised; empty if one partition is all."""
    shape = (num_rows, num_heads, num_splits) if num_splits > 1 else (0, num_heads, num_splits)
    return Partials(
        torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
