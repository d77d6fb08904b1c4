"""A whole forward pass as one call, for backends that can compile it: no Python between its operations.

It computes, bit for bit, what the backend's single operations compute one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kernels.batch import AttentionBatch, KVLayerView


@dataclass(frozen=True, slots=True)
class StepProduct:
    """y = x W^T + b over rows quantized as `RowQuantizer` says; W ~ values * scales[:, None]."""

    values: torch.Tensor  # [N, K] int8 within ±127
    scales: torch.Tensor  # [N] fp32
    bias: torch.Tensor | None  # [N] fp32


@dataclass(frozen=True, slots=True)
class StepLayer:
    """Norms' weights are inside the products that follow them."""

    qkv: StepProduct  # hidden -> q heads | k heads | v heads
    q_norm: torch.Tensor | None  # [head_dim] fp32
    k_norm: torch.Tensor | None  # [head_dim] fp32
    key_offset: torch.Tensor | None  # [num_kv_heads, head_dim] fp32, taken off K after its Hadamard transform
    attention_offset: torch.Tensor | None  # [hidden] fp32, as `RowQuantizer.rms_norm_quantize` takes it, before qkv
    mlp_offset: torch.Tensor | None  # [hidden] fp32, before gate_up
    output: StepProduct
    gate_up: StepProduct  # gate first
    down: StepProduct
    window: int  # 0: the whole context


@dataclass(frozen=True, slots=True)
class StepModel:
    embedding: torch.Tensor  # [V, hidden] fp32
    cos: torch.Tensor  # [positions, head_dim / 2] fp32
    sin: torch.Tensor
    layers: Sequence[StepLayer]
    head: StepProduct
    head_offset: torch.Tensor | None  # [hidden] fp32
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    hadamard_block: int  # of the down projection's input; 1: none
    head_block: int  # of each head's K and Q after rope; 1: none


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: torch.Tensor  # [T] int64, below V
    positions: torch.Tensor  # [T] int64, below the tables' length
    logit_rows: torch.Tensor  # [R] int64
    attention: AttentionBatch


class Step(Protocol):
    """One model, compiled. Calls must not overlap: they share memory."""

    def run(self, batch: StepBatch, layers: Sequence[KVLayerView], nonfinite: torch.Tensor) -> torch.Tensor:
        """Writes the new tokens' K and V into `layers` (mutated) and returns logits [R, V] fp32.

        `nonfinite` [T] int32 is mutated as by `Ops.write_kv`. Raises IndexError for a slot or a block that is not in
        the pool; nothing is written then.
        """


@runtime_checkable
class StepCompiler(Protocol):
    product_description: str  # names the instructions of its integer products

    def compile_step(self, model: StepModel) -> Step: ...
