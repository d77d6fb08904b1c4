"""What the forward pass needs to know of a model; made once from a transformers configuration (see `loading`)."""

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was trained for
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMS norm of each head of q and k before the rotation
    rope_inv_freq: tuple[float, ...]  # [head_dim / 2] fp32 values, rope scaling folded in
    rope_attention_scale: float  # multiplies cos and sin
    layer_windows: tuple[int, ...]  # [num_layers]; 0: full attention, else the sliding window
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
