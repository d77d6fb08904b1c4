"""The configuration of a GGUF file's model, from its header; refuses by name what we do not read out of one."""

from typing import Any

from common.errors import ModelLoadError
from common.model.config import ModelConfig
from common.model.families import to_model_config
from common.model.gguf_header import GgufHeader, read_fp32_tensor
from common.model.tokenizer_export import ExportedTokenizer
from common.model.transformers_seam import transformers_seam

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that carries the scaling of the rotation's frequencies; the only one that is no weight."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp files Mistral under llama
_ROPE_SCALINGS = ("none", "linear")
_DEFAULT_ROPE_THETA = 10000.0  # llama.cpp's, where a file has none
_REQUIRED = {  # GGUF -> transformers
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_REFUSED = {
    "attention.sliding_window": "a sliding window",
    "expert_count": "a mixture of experts",
}
_STOP_TOKENS = ("eos_token_id", "eot_token_id")  # of the text; of a turn in a chat


def check_gguf_supported(header: GgufHeader) -> None:
    """ModelLoadError names what is not supported; the tensors themselves are not checked here."""
    path, architecture = header.path, header.architecture
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(f"{path}: architecture {architecture!r} is not supported; supported: {known}")
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelLoadError(f"{path} is one of {parts} parts; merge them into one file (gguf-split --merge)")
    scaling = _rope_scaling(header)
    if scaling not in _ROPE_SCALINGS:
        raise ModelLoadError(
            f"{path}: rope scaling {scaling!r} is not supported in a GGUF file ({', '.join(_ROPE_SCALINGS)} are); "
            "give the Hugging Face folder"
        )
    for key, meaning in _REFUSED.items():
        if header.number(key):
            raise ModelLoadError(f"{path}: {meaning} ({architecture}.{key}) is not supported in a GGUF file")
    for key in _REQUIRED:
        if not header.number(key):
            raise ModelLoadError(f"{path} does not say {architecture}.{key}")


def gguf_model_config(header: GgufHeader, name: str, tokenizer: ExportedTokenizer) -> ModelConfig:
    """Precondition: `check_gguf_supported`. Needs transformers."""
    stop_ids = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_TOKENS]
    eos_token_ids = [value for value in (*stop_ids, tokenizer.eos_token_id) if isinstance(value, int)]
    divisors = read_fp32_tensor(header, ROPE_DIVISORS) if ROPE_DIVISORS in header.tensors else None
    with transformers_seam(header.path, "reading the configuration"):
        from transformers import AutoConfig

        config = AutoConfig.for_model(header.architecture, **_arguments(header))
        return to_model_config(name, config, header.path, eos_token_ids, tokenizer.bos_token_id, divisors)


def _arguments(header: GgufHeader) -> dict[str, Any]:
    """Everything is set: a class's defaults are one checkpoint's values."""
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path}: tensor token_embd.weight is missing")
    values: dict[str, Any] = {target: header.number(key) for key, target in _REQUIRED.items()}
    head_dim = header.number("attention.key_length") or values["hidden_size"] // values["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": float(header.number("rope.freq_base", _DEFAULT_ROPE_THETA))}
    if _rope_scaling(header) == "linear":
        rope |= {"rope_type": "linear", "factor": float(header.number("rope.scaling.factor", 1.0))}
    return values | {
        "head_dim": head_dim,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "use_sliding_window": False,
        "rope_parameters": rope,
    }


def _rope_scaling(header: GgufHeader) -> str:
    return str(header.metadata.get(f"{header.architecture}.rope.scaling.type", "none"))
