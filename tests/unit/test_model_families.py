"""A transformers configuration in our terms: against what transformers' own modules make of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ModelLoadError
from common.model.config import Family, ModelConfig
from common.model.config_json import config_from_json, config_to_json
from common.model.families import check_supported, to_model_config
from tests.support.tiny_models import FAMILIES, tiny_config

FILE = Path("folder/config.json")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1_000_000.0}


def converted(family: str, **overrides: Any) -> ModelConfig:
    return to_model_config("tiny", tiny_config(family, **overrides), FILE, [1], 0)


@pytest.mark.parametrize("rope", [DEFAULT, LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rotation_is_bit_for_bit_transformers_own(family: str, rope: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family, rope_parameters=dict(rope)))
    config = converted(family, rope_parameters=dict(rope))
    assert torch.equal(torch.tensor(config.rope_inv_freq), model.model.rotary_emb.inv_freq)
    assert config.rope_attention_scale == model.model.rotary_emb.attention_scaling


@pytest.mark.parametrize(
    ("family", "overrides", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, True, False),
        ("mistral", {}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_are_where_transformers_has_them(
    family: str, overrides: dict[str, Any], qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool
) -> None:
    config = converted(family, **overrides)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (
        qkv_bias, output_bias, mlp_bias, qk_norm)  # fmt: skip
    layer = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).model.layers[0]
    assert (layer.self_attn.q_proj.bias is not None) == qkv_bias
    assert (layer.self_attn.o_proj.bias is not None) == output_bias
    assert (layer.mlp.down_proj.bias is not None) == mlp_bias
    assert hasattr(layer.self_attn, "q_norm") == qk_norm


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {}, (0, 0, 0)),
        ("mistral", {}, (0, 0, 0)),
        ("mistral", {"sliding_window": 64}, (64, 64, 64)),
        ("qwen2", {"sliding_window": 64}, (0, 0, 0)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (0, 64, 64)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, (64, 64, 64)),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, 0, 8),
        ),
    ],
)  # fmt: skip
def test_windows_per_layer(family: str, overrides: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert converted(family, num_hidden_layers=3, **overrides).layer_windows == windows


def test_plain_values() -> None:
    config = converted("qwen2", num_key_value_heads=1, tie_word_embeddings=False)
    assert config.family is Family.QWEN2
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (512, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 1, 16)
    assert (config.max_model_len, config.rms_norm_eps, config.tie_word_embeddings) == (1024, 1e-6, False)
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 0)


def test_stop_tokens_are_a_sorted_set() -> None:
    assert to_model_config("tiny", tiny_config("llama"), FILE, [7, 2, 7, 1], None).eos_token_ids == (1, 2, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_reads_back_from_json_exactly(family: str) -> None:
    config = converted(family)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "no finite rotation"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ("llama", {"head_dim": 15}, "rope rotates 16 of a head's 15 values"),
    ],
)
def test_what_the_forward_pass_cannot_do_is_named(family: str, settings: dict[str, Any], reason: str) -> None:
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)  # past transformers' own checks, which differ between its versions
    with pytest.raises(ModelLoadError) as raised:
        to_model_config("tiny", config, FILE, [1], 0)
    assert reason in str(raised.value)
    assert str(FILE) in str(raised.value)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "model_type None is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq)"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config (None)"),
    ],
)  # fmt: skip
def test_an_unsupported_model_is_named(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        check_supported(raw, FILE)
    assert reason in str(raised.value)
    assert str(FILE) in str(raised.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_supported_model_passes(family: str) -> None:
    check_supported(json.loads(tiny_config(family).to_json_string()), FILE)
    check_supported({"model_type": family, "architectures": None}, FILE)
