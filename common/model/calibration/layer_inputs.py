"""Runs a model's layers one at a time over the calibration text, on the int8 path itself, and keeps what products read.

Every value is computed by the code that serves requests, so no family needs code of its own here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.batch import ScheduledTokens, build_batch
from common.model.config import ModelConfig
from common.model.int8_product import IntegerProduct, QuantizedWeight, integer_product
from common.model.linear import Numerics
from common.model.transformer import Transformer, head_block
from kernels.batch import AttentionBatch, KVLayerView
from kernels.contract import Ops
from kernels.quantized import QuantizedRows, RowQuantizer, hadamard, row_quantizer

PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The products of a layer in the order in which they read; those in one tuple read the same input."""
_BLOCK_SIZE = 16
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerRun:
    inputs: tuple[QuantizedRows, ...]  # as PRODUCTS
    keys: torch.Tensor  # [T, num_kv_heads, head_dim] fp32, after rope, before the Hadamard transform
    queries: torch.Tensor  # [T, num_heads, head_dim] fp32, the same
    residual: torch.Tensor  # [T, hidden] fp32, after the layer
    head_input: QuantizedRows  # the residual as the head would read it, were this the last layer


class LayerRunner:
    """Layers of `config` (the rotated model's), for all of `sequences` (token ids) at once."""

    def __init__(self, config: ModelConfig, down_block: int, ops: Ops, sequences: Sequence[Sequence[int]]) -> None:
        self._config, self._down_block, self._ops = config, down_block, ops
        self._layout = KVLayout(KVFormat.INT8, _BLOCK_SIZE, 1, config.num_kv_heads, config.head_dim)
        self._lengths = [len(sequence) for sequence in sequences]

    def run(self, layer: int, weights: Mapping[str, torch.Tensor], residual: torch.Tensor) -> LayerRun:
        """`weights` of this layer alone, under the names that follow `model.layers.N.`; residual [T, hidden] fp32.

        The layer becomes a model of one layer whose vocabulary is the residual stream so far: token t is its row t.
        """
        hidden = self._config.hidden_size
        model = {f"model.layers.0.{name}": weight for name, weight in weights.items()}
        model |= {
            "model.embed_tokens.weight": residual,
            "model.norm.weight": torch.ones(hidden),
            _HEAD: torch.zeros((1, hidden), dtype=torch.int8),
            f"{_HEAD}_scales": torch.ones(1),
        }
        config = replace(self._config, num_layers=1, layer_windows=self._config.layer_windows[layer : layer + 1])
        recorder = _Recorder(self._ops)
        ops = cast(Ops, recorder)
        max_len = max(self._lengths)
        device = torch.device("cpu")
        transformer = Transformer(config, model, ops, device, Numerics.INT8, max_len, self._down_block)
        scheduled = self._scheduled()
        cache = KVCache(self._layout, sum(len(entry.block_ids) for entry in scheduled), device)
        transformer.forward(build_batch(scheduled, _BLOCK_SIZE, device), cache)
        *inputs, head_input = recorder.quantized
        assert len(inputs) == len(PRODUCTS), f"a layer of {len(inputs)} products"
        keys, queries = (hadamard(x, head_block(config, Numerics.INT8)) for x in (recorder.keys, recorder.queries))
        return LayerRun(tuple(inputs), keys, queries, recorder.last_normed, head_input)

    def _scheduled(self) -> list[ScheduledTokens]:
        scheduled, row, block = [], 0, 0
        for length in self._lengths:
            num_blocks = self._layout.num_blocks(length)
            scheduled.append(ScheduledTokens(range(row, row + length), 0, range(block, block + num_blocks), length))
            row, block = row + length, block + num_blocks
        return scheduled


class _Recorder:
    """Operations that keep each product's quantized input, in the order of their making, and what attention reads."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._quantizer: RowQuantizer = row_quantizer(ops)
        self.quantized: list[QuantizedRows] = []
        self.last_normed = self.keys = self.queries = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def quantize_rows(self, x: torch.Tensor) -> QuantizedRows:
        return self._keep(self._quantizer.quantize_rows(x))

    def rms_norm_quantize(self, x: torch.Tensor, eps: float, offset: torch.Tensor | None) -> QuantizedRows:
        self.last_normed = x.clone()
        return self._keep(self._quantizer.rms_norm_quantize(x, eps, offset))

    def silu_mul_quantize(self, gate_up: torch.Tensor, row_scales: torch.Tensor | None, block: int) -> QuantizedRows:
        return self._keep(self._quantizer.silu_mul_quantize(gate_up, row_scales, block))

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
    ) -> None:
        self.keys = k.clone()
        self._ops.write_kv(k, v, layer, slot_mapping, nonfinite)

    def paged_attention(
        self, q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
    ) -> torch.Tensor:
        self.queries = q.clone()
        return self._ops.paged_attention(q, layer, batch, scale, window)

    def add_scaled(self, x: torch.Tensor, product: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        return self._quantizer.add_scaled(x, product, row_scales)

    def make_integer_product(self, values: torch.Tensor, scales: torch.Tensor) -> IntegerProduct:
        return integer_product(self._ops, QuantizedWeight(values, scales))

    def _keep(self, rows: QuantizedRows) -> QuantizedRows:
        # Copies, since a backend may use its buffers again.
        self.quantized.append(QuantizedRows(rows.values.clone(), rows.scales.clone()))
        return rows
