"""What a transformers configuration means for our forward pass; refuses by name what the forward pass cannot do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelLoadError
from common.model.config import Family, ModelConfig

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
_SCALED_ROPE_TYPES = ("linear", "llama3", "yarn")
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def check_supported(raw: Mapping[str, Any], file: Path) -> None:
    """`raw` is config.json as it stands: its family, architecture and weight format must be ours to serve."""
    known = ", ".join(ARCHITECTURES.values())
    model_type = raw.get("model_type")
    architectures = raw.get("architectures") or []
    named = architectures[0] if isinstance(architectures, list) and architectures else f"model_type {model_type!r}"
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ModelLoadError(f"{file}: {named} is not supported; supported: {known}")
    expected = ARCHITECTURES[Family(model_type)]
    if architectures and named != expected:
        raise ModelLoadError(f"{file}: architecture {named} is not supported; of this family, {expected} is")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(
            f"{file}: quantization_config ({method}) is not supported; give the model's fp32, fp16 or bf16 checkpoint"
        )


def to_model_config(
    name: str,
    config: Any,
    file: Path,
    eos_token_ids: Iterable[int],
    bos_token_id: int | None,
    rope_divisors: Sequence[float] | None = None,
) -> ModelConfig:
    """`config` is a transformers configuration of a supported family, `file` what errors name.

    `rope_divisors` ([head_dim / 2]) divide the rotation's frequencies: a GGUF file carries its rope scaling so.
    """
    family = Family(config.model_type)
    _check_shape(config, file)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, attention_scale = _rope(config, head_dim, rope_divisors, file)
    has_attention_bias = bool(getattr(config, "attention_bias", False)) and family in (Family.LLAMA, Family.QWEN3)
    return ModelConfig(
        name=name,
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_model_len=config.max_position_embeddings,
        rms_norm_eps=float(config.rms_norm_eps),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=has_attention_bias or family is Family.QWEN2,
        output_bias=has_attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and family is Family.LLAMA,
        qk_norm=family is Family.QWEN3,
        rope_inv_freq=inv_freq,
        rope_attention_scale=attention_scale,
        layer_windows=_layer_windows(config, family, file),
        eos_token_ids=tuple(sorted(set(eos_token_ids))),
        bos_token_id=bos_token_id,
    )


def token_ids(value: int | list[int] | None) -> list[int]:
    """The ids of a setting that may hold one, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_shape(config: Any, file: Path) -> None:
    for name in _COUNTS:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{file}: {name} is {value!r}; a number of at least 1 was expected")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelLoadError(f"{file}: {heads} query heads cannot share {kv_heads} KV heads evenly")
    if config.hidden_act not in _ACTIVATIONS:
        raise ModelLoadError(f"{file}: activation {config.hidden_act!r} is not supported; silu is")
    if not 0 < config.rms_norm_eps < 1:
        raise ModelLoadError(f"{file}: rms_norm_eps is {config.rms_norm_eps!r}; a small positive number was expected")


def _rope(config: Any, head_dim: int, divisors: Sequence[float] | None, file: Path) -> tuple[tuple[float, ...], float]:
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    if rope_type == "default":
        inv_freq, scale = _default_inv_freq(float(parameters["rope_theta"]), head_dim), 1.0
    elif rope_type in _SCALED_ROPE_TYPES:
        inv_freq, scale = _scaled_rope(rope_type)(config, None)
    else:
        supported = ", ".join(("default", *_SCALED_ROPE_TYPES))
        raise ModelLoadError(f"{file}: rope type {rope_type!r} is not supported; supported: {supported}")
    if inv_freq.numel() * 2 != head_dim:
        raise ModelLoadError(
            f"{file}: rope rotates {inv_freq.numel() * 2} of a head's {head_dim} values; only all of them is supported"
        )
    if divisors is not None:
        inv_freq = inv_freq / inv_freq.new_tensor(divisors)
    frequencies = tuple(inv_freq.tolist())
    if not all(map(isfinite, (*frequencies, scale))):
        raise ModelLoadError(f"{file}: the rope parameters {dict(parameters)} give no finite rotation")
    return frequencies, float(scale)


def _default_inv_freq(theta: float, head_dim: int) -> "torch.Tensor":
    """theta^(-2i / head_dim), [head_dim / 2] fp32, in the order of operations that transformers uses."""
    import torch

    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def _scaled_rope(rope_type: str) -> "Callable[[Any, torch.device | None], tuple[torch.Tensor, float]]":
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope_type]


def _layer_windows(config: Any, family: Family, file: Path) -> tuple[int, ...]:
    if family is Family.LLAMA:
        return (0,) * config.num_hidden_layers
    window = 0 if config.sliding_window is None else config.sliding_window
    if not isinstance(window, int) or window < 0:
        raise ModelLoadError(f"{file}: sliding_window is {window!r}; a number of positions was expected")
    if family is Family.MISTRAL:
        return (window,) * config.num_hidden_layers
    windows = {"full_attention": 0, "sliding_attention": window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise ModelLoadError(f"{file}: layer type {unknown[0]!r} is not supported; supported: {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in config.layer_types)
