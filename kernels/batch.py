"""What attention needs to know of a step's batch, and how it sees the KV pool."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences with T new tokens between them, laid end to end.

    Query rows of sequence s are `query_start[s] : query_start[s + 1]`; the last of them sees `context_lens[s]`
    positions (itself included), the one before it one fewer, and so on: causal.
    """

    query_start: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32: positions with valid KV once the new tokens are written
    block_tables: torch.Tensor  # [S, max_blocks] int32 block ids; entries past a sequence's blocks are not read
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset for each new token
    max_query_len: int
    max_context_len: int

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class KVLayerView:
    """One layer of a KV pool as strided views of the pool's bytes (N blocks of B positions, H KV heads of D).

    Quantized (int8): value = q * scale, scale one fp16 per token and head. Unquantized: k, v are fp32, scales None.
    """

    k: torch.Tensor  # [N, H, B, D] int8 or fp32
    v: torch.Tensor  # [N, H, B, D] int8 or fp32
    k_scale: torch.Tensor | None  # [N, H, B] fp16
    v_scale: torch.Tensor | None  # [N, H, B] fp16

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def is_quantized(self) -> bool:
        return self.k_scale is not None
