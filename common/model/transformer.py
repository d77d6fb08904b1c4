"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 over paged KV; what differs between them is in ModelConfig.

Owns the weights on the device. Reads and writes KV only through `Ops`; knows nothing of sequences or schedules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from common.kv.cache import KVCache
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layer_weights import LayerWeights, head_weights, layer_weights
from common.model.linear import Linear, LinearMaker, Numerics, linear_maker
from kernels.batch import AttentionBatch, KVLayerView
from kernels.contract import Ops
from kernels.quantized import hadamard


@dataclass(frozen=True, slots=True)
class ForwardResult:
    logits: torch.Tensor  # [R, V] fp32: of the batch's logit_rows, in their order
    nonfinite: torch.Tensor  # [T] int32: heads of K or V with a NaN or an Inf that each new token met


class ForwardPass(Protocol):
    """A model on one device."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardResult:
        """Writes the new tokens' K and V into `cache` (mutated) and returns logits.

        Preconditions: `batch` is on this device; its token ids are below the vocabulary size and its positions below
        max_model_len; the KV of every earlier position is in the cache.
        """


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear  # norm, then hidden -> q heads | k heads | v heads
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    key_offset: torch.Tensor | None  # [num_kv_heads, head_dim]
    output: Linear
    mlp: Linear  # with its norm, and the residual added
    window: int


class Transformer:
    """One model on one device.

    `weights` are fp32 tensors on `device` under Hugging Face's names, those of `checkpoint.expected_shapes(config)`.
    For the int8 path a product's weight may be int8, with its scales [out] fp32 under its name with `_scales`.
    Serves positions below `max_model_len` (none: all that the configuration has). `down_block` is the Hadamard
    transform that the weights expect on the down projection's input (see `rotation`); 1: none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        ops: Ops,
        device: torch.device,
        numerics: Numerics,
        max_model_len: int | None = None,
        down_block: int = 1,
    ) -> None:
        self.config = config
        self.device = device
        self._ops = ops
        self._embedding = weights["model.embed_tokens.weight"]
        maker = linear_maker(numerics, ops)
        self._layers = tuple(
            _make_layer(layer_weights(config, weights, index), maker, down_block) for index in range(config.num_layers)
        )
        self._head_block = head_block(config, numerics)
        self._head = maker.norm_linear(*head_weights(config, weights))
        self._cos, self._sin = rotation_table(config, max_model_len or config.max_model_len, device)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardResult:
        """See `ForwardPass`."""
        with torch.inference_mode():
            nonfinite = torch.zeros(batch.token_ids.shape[0], dtype=torch.int32, device=self.device)
            x = self._run_layers(batch, cache, nonfinite)
            return ForwardResult(self._head(x[batch.logit_rows]), nonfinite)

    def _run_layers(self, batch: ForwardBatch, cache: KVCache, nonfinite: torch.Tensor) -> torch.Tensor:
        """The residual stream [T, hidden] after the last layer."""
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        x = F.embedding(batch.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            x += self._attend(layer, x, cos, sin, cache.layer(index), batch.attention, nonfinite)
            x = layer.mlp(x)
        return x

    def _attend(
        self,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayerView,
        attention: AttentionBatch,
        nonfinite: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        num_tokens = x.shape[0]
        heads = layer.qkv(x).view(num_tokens, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rms_norm(rotated[:, : config.num_heads], layer.q_norm, config.rms_norm_eps)
            k = self._ops.rms_norm(rotated[:, config.num_heads :], layer.k_norm, config.rms_norm_eps)
            rotated = torch.cat((q, k), dim=1)
        rotated = self._ops.rope(rotated, cos, sin)
        if self._head_block > 1:
            rotated = hadamard(rotated, self._head_block)
        q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        if layer.key_offset is not None:
            k = k - layer.key_offset
        self._ops.write_kv(k, v, kv, attention.slot_mapping, nonfinite)
        attended = self._ops.paged_attention(q, kv, attention, config.head_dim**-0.5, layer.window)
        return layer.output(attended.reshape(num_tokens, -1))


def _make_layer(weights: LayerWeights, maker: LinearMaker, down_block: int) -> _Layer:
    return _Layer(
        qkv=maker.norm_linear(weights.attention_norm, weights.qkv),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        key_offset=weights.key_offset,
        output=maker.linear(weights.output),
        mlp=maker.mlp(weights.mlp_norm, weights.gate_up, weights.down, down_block),
        window=weights.window,
    )


def head_block(config: ModelConfig, numerics: Numerics) -> int:
    """Size of the Hadamard transform of K and Q of each head after rope, on the int8 path: scores stay, outliers go."""
    return config.head_dim & -config.head_dim if numerics is Numerics.INT8 else 1


def rotation_table(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num_positions, head_dim / 2] fp32.

    A table made once, because a vectorized cosine may round a value by where it stands in its tensor; the angles are
    fp32 products of position and frequency, as in transformers.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    frequencies = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return angles.cos() * config.rope_attention_scale, angles.sin() * config.rope_attention_scale
