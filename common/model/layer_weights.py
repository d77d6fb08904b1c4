"""A layer's weights by what they do; products that read the same input are stacked into one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from common.model.config import ModelConfig
from common.model.int8_product import QuantizedWeight
from common.model.linear import LinearWeights, Norm, Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Norm
    qkv: LinearWeights  # hidden -> q heads | k heads | v heads
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    key_offset: torch.Tensor | None  # [num_kv_heads, head_dim], of the int8 path; see `calibration.key_balancing`
    output: LinearWeights
    mlp_norm: Norm
    gate_up: LinearWeights  # gate first
    down: LinearWeights
    window: int  # 0: the whole context


def layer_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor], index: int) -> LayerWeights:
    """`weights` as in `Transformer`."""
    name = f"model.layers.{index}"

    def stacked(*names: str) -> LinearWeights:
        """Biases come with the checkpoint, or from offsets of the int8 path."""
        weight = _stacked([_weight(weights, f"{name}.{part}") for part in names])
        biases = [weights[f"{name}.{part}.bias"] for part in names if f"{name}.{part}.bias" in weights]
        return LinearWeights(weight, torch.cat(biases) if biases else None)

    def norm(part: str) -> Norm:
        return Norm(weights[f"{name}.{part}.weight"], config.rms_norm_eps, weights.get(f"{name}.{part}.offset"))

    offset = weights.get(f"{name}.self_attn.k_offset")
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=weights[f"{name}.self_attn.q_norm.weight"] if config.qk_norm else None,
        k_norm=weights[f"{name}.self_attn.k_norm.weight"] if config.qk_norm else None,
        key_offset=None if offset is None else offset.view(config.num_kv_heads, config.head_dim),
        output=stacked("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=stacked("mlp.down_proj"),
        window=config.layer_windows[index],
    )


def head_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> tuple[Norm, LinearWeights]:
    """The final norm and the head; a tied head is the embedding itself."""
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    norm = Norm(weights["model.norm.weight"], config.rms_norm_eps, weights.get("model.norm.offset"))
    return norm, LinearWeights(_weight(weights, name), weights.get(f"{name}.bias"))


def _weight(weights: Mapping[str, torch.Tensor], product: str) -> Weight:
    weight = weights[f"{product}.weight"]
    return QuantizedWeight(weight, weights[f"{product}.weight_scales"]) if weight.dtype == torch.int8 else weight


def _stacked(parts: Sequence[Weight]) -> Weight:
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat(parts)
    values, scales = zip(*quantized, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales))
