"""From a GGUF file to fp32 safetensors under Hugging Face's names, once.

transformers makes the tokenizer and the configuration. The weights are read here, to the same bits as by its own
reader, which takes five times as long, invents tensors that are missing and drops those it does not know.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ModelLoadError
from common.model.checkpoint import expected_shapes
from common.model.config import ModelConfig
from common.model.gguf_config import ROPE_DIVISORS, check_gguf_supported, gguf_model_config
from common.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from common.model.tokenizer_export import ExportedTokenizer, export_gguf_tokenizer
from common.model.transformers_seam import transformers_seam

if TYPE_CHECKING:
    import numpy as np

CONVERTED_WEIGHTS = "model.safetensors"
_GGUF_MODULES = {  # Hugging Face -> GGUF; the modules of a layer without their layer
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert_gguf(gguf: Path, name: str, folder: Path) -> tuple[ModelConfig, ExportedTokenizer]:
    """Writes the weights to `folder`/model.safetensors; needs transformers.

    Raises ModelLoadError that names the file and what is wrong with it or not supported.
    """
    header = read_gguf_header(gguf)
    check_gguf_supported(header)
    tokenizer = export_gguf_tokenizer(header, folder)
    config = gguf_model_config(header, name, tokenizer)
    names = _check_tensors(header, config)
    file = folder / CONVERTED_WEIGHTS
    with transformers_seam(gguf, f"converting it to {file}"):
        from safetensors.numpy import save_file

        save_file(dict(_converted(header, config, names)), file, metadata={"format": "pt"})
    return config, tokenizer


def _check_tensors(header: GgufHeader, config: ModelConfig) -> dict[str, str]:
    """Hugging Face name -> GGUF name. Every tensor is there, in its shape, and no other."""
    names = {}
    for name, shape in expected_shapes(config).items():
        names[name] = gguf_name = _gguf_name(name)
        tensor = header.tensors.get(gguf_name)
        if tensor is None:
            raise ModelLoadError(f"{header.path}: tensor {gguf_name} is missing")
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{header.path}: tensor {gguf_name} has shape {tensor.shape}; the file's metadata says {shape}"
            )
    unknown = sorted(set(header.tensors) - set(names.values()) - {ROPE_DIVISORS})
    if unknown:
        raise ModelLoadError(f"{header.path}: tensor {unknown[0]} is not part of a {header.architecture} model")
    return names


def _gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_GGUF_MODULES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_MODULES[inner]}.{kind}"


def _converted(header: GgufHeader, config: ModelConfig, names: dict[str, str]) -> "Iterator[tuple[str, np.ndarray]]":
    for name, gguf_name in names.items():
        weight = _dequantized(header.path, header.tensors[gguf_name])
        if header.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = _rotate_half_order(weight, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        yield name, weight


def _dequantized(path: Path, tensor: GgufTensor) -> "np.ndarray":
    """fp32, in the tensor's shape."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    data = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    values = dequantize(data.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType(tensor.type_id))
    return np.ascontiguousarray(values.reshape(tensor.shape), dtype=np.float32)


def _rotate_half_order(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Rows of q or k from llama.cpp's order to ours, [num_heads * head_dim, ...].

    llama.cpp rotates neighbours (0, 1), (2, 3) ... within a head, we rotate (0, d/2), (1, d/2 + 1) ...
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
