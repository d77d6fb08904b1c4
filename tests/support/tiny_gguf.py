"""Tiny GGUF files: a tiny Hugging Face folder written as llama.cpp's converter would write it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file

from tests.support.tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID

_MODULES = {
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


def write_tiny_gguf(
    file: Path,
    folder: Path,
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    pre_tokenizer: str | None = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    omit: tuple[str, ...] = (),
) -> Path:
    """Writes `folder` (of `make_tiny_model`) to `file` and returns it.

    `quantization` is of the matrices (F32, F16, Q8_0, Q4_1); `metadata` adds integer, float or string values, or
    replaces those of the same key; `omit` leaves out metadata or tensors by their GGUF name.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(file, architecture)
    for key, value in (_metadata(config, architecture) | dict(metadata or {})).items():
        if key not in omit:
            _add(writer, key, value)
    _add_tokenizer(writer, folder, pre_tokenizer)
    for name, weight in {**_tensors(config, folder, architecture), **(extra_tensors or {})}.items():
        if name not in omit:
            _add_tensor(writer, name, weight, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    return {"general.name": "tiny"} | {f"{architecture}.{key}": value for key, value in values.items()}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: GGUFWriter, folder: Path, pre_tokenizer: str | None) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre_tokenizer is not None:
        writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(config: dict[str, Any], folder: Path, architecture: str) -> dict[str, np.ndarray]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if architecture == "llama" and projection in heads:
            # llama.cpp rotates neighbouring rows of a head, Hugging Face rows half a head apart
            halves = weight.reshape(heads[projection], 2, -1, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if module.startswith("model.layers."):
            _, _, layer, inner = module.split(".", 3)
            tensors[f"blk.{layer}.{_MODULES[inner]}.{kind}"] = weight
        else:
            tensors[f"{_MODULES[module]}.{kind}"] = weight
    return tensors


def _add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, quantization: str) -> None:
    if weight.ndim < 2 or quantization == "F32":
        writer.add_tensor(name, np.ascontiguousarray(weight))
        return
    kind = GGMLQuantizationType[quantization]
    writer.add_tensor(name, quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
