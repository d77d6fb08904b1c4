"""Safetensors files of a model, by their headers: every tensor that the configuration asks for, of its shape, no other.

Needs no torch.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from common.errors import ModelLoadError
from common.model.config import ModelConfig

_FLOAT_FORMATS = ("F32", "F16", "BF16")  # the latter two widen to fp32 exactly
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # old checkpoints carry what ModelConfig computes


def check_weight_files(files: Sequence[Path], config: ModelConfig) -> None:
    """ModelLoadError names the file, and the tensor when one is missing, unknown or misshapen."""
    for _ in wanted_tensors(files, config, "numpy"):
        pass


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the forward pass reads, by its Hugging Face name."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {  # name: (out, in, has a bias)
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (out_features, in_features, has_bias) in products.items():
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def wanted_tensors(files: Sequence[Path], config: ModelConfig, framework: str) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, the file opened for `framework`) of each expected tensor, checked as in `check_weight_files`."""
    missing = expected_shapes(config)
    for file in files:
        with _open(file, framework) as content:
            for name in content.keys():  # noqa: SIM118  (not a mapping)
                if _DERIVED.search(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
                    continue
                _check_tensor(file, name, content, missing.pop(name, None))
                yield file, name, content
    if missing:
        folder = files[0].parent
        raise ModelLoadError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}")


def _check_tensor(file: Path, name: str, content: Any, expected: tuple[int, ...] | None) -> None:
    if expected is None:
        raise ModelLoadError(f"{file}: tensor {name} is not part of the model that its configuration describes")
    with named_errors(file):
        entry = content.get_slice(name)
        shape, number_format = tuple(entry.get_shape()), entry.get_dtype()
    if shape != expected:
        raise ModelLoadError(f"{file}: tensor {name} has shape {shape}; the configuration says {expected}")
    if number_format not in _FLOAT_FORMATS:
        raise ModelLoadError(
            f"{file}: tensor {name} has format {number_format}; supported: {', '.join(_FLOAT_FORMATS)}"
        )


@contextmanager
def _open(file: Path, framework: str) -> Iterator[Any]:
    with named_errors(file):
        content = safe_open(file, framework=framework, device="cpu")
    with content as opened:
        yield opened


@contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """ModelLoadError with the file's name for what safetensors raises."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error
