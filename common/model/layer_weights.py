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
    output: LinearWeights
    mlp_norm: Norm
    gate_up: LinearWeights  # gate first
    down: LinearWeights
    window: int  # 0: the whole context


def layer_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor], index: int) -> LayerWeights:
    """`weights` as in `Transformer`."""
    name = f"model.layers.{index}"

    def stacked(*names: str, has_bias: bool) -> LinearWeights:
        weight = _stacked([_weight(weights, f"{name}.{part}") for part in names])
        bias = torch.cat([weights[f"{name}.{part}.bias"] for part in names]) if has_bias else None
        return LinearWeights(weight, bias)

    def norm(part: str) -> Norm:
        return Norm(weights[f"{name}.{part}.weight"], config.rms_norm_eps)

    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=config.qkv_bias),
        q_norm=weights[f"{name}.self_attn.q_norm.weight"] if config.qk_norm else None,
        k_norm=weights[f"{name}.self_attn.k_norm.weight"] if config.qk_norm else None,
        output=stacked("self_attn.o_proj", has_bias=config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj", has_bias=config.mlp_bias),
        down=stacked("mlp.down_proj", has_bias=config.mlp_bias),
        window=config.layer_windows[index],
    )


def head_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> tuple[Norm, LinearWeights]:
    """The final norm and the head; a tied head is the embedding itself."""
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    norm = Norm(weights["model.norm.weight"], config.rms_norm_eps)
    return norm, LinearWeights(_weight(weights, name), None)


def _weight(weights: Mapping[str, torch.Tensor], product: str) -> Weight:
    weight = weights[f"{product}.weight"]
    return QuantizedWeight(weight, weights[f"{product}.weight_scales"]) if weight.dtype == torch.int8 else weight


def _stacked(parts: Sequence[Weight]) -> Weight:
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat(parts)
    values, scales = zip(*quantized, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales))
