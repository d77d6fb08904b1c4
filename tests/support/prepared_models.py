"""A PreparedModel of fixed values, with no files behind it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.model.config import Family, ModelConfig
from common.model.prepared import PreparedModel

CONFIG = ModelConfig(
    name="fixed",
    family=Family.LLAMA,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=1024,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope_inv_freq=(1.0, 0.5, 0.25, 0.125),
    rope_attention_scale=1.0,
    layer_windows=(0, 16),
    eos_token_ids=(1,),
    bos_token_id=0,
)


def fixed_prepared_model(
    *, weights_digest: bytes = bytes(range(32)), tokenizer_digest: bytes = bytes(range(32, 64)), **config: Any
) -> PreparedModel:
    """`config` replaces fields of CONFIG."""
    return PreparedModel(
        name="fixed",
        folder=Path("/nowhere"),
        config=replace(CONFIG, **config),
        weight_files=(),
        weights_digest=weights_digest,
        tokenizer_files={},
        tokenizer_digest=tokenizer_digest,
    )
