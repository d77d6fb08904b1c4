"""Tiny random Hugging Face folders of every supported family: the same bytes for the same arguments, every time."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 512
BOS_TOKEN, EOS_TOKEN, START_TOKEN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
BOS_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
_TRAINING_TEXT = (
    "The engine takes a prompt, compresses it in one stroke and delivers the answer in the other.",
    "A block holds sixteen positions of keys and values, and every block has a name of its own.",
    "def total(values):\n    return sum(value for value in values if value is not None)\n",
    "Größe, façade, naïve, señor: letters beyond the first hundred and twenty-eight are bytes as well.",
    "When the gateway asks for room, decode answers with a ticket; without a ticket there is no prefill.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 100 1000 10000; if x < 3: print(x + 1)",
    "What is the capital of France? The capital of France is Paris, and it stands on the river Seine.",
    "Once upon a time there was a small machine that could answer questions about everything it had read.",
)


def make_tiny_model(
    folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "50GB", **overrides: Any
) -> Path:
    """Writes a model with a tokenizer to `folder` and returns it.

    `overrides` go to the family's transformers configuration: num_hidden_layers, num_key_value_heads, head_dim,
    tie_word_embeddings, attention_bias, mlp_bias, sliding_window, use_sliding_window, max_window_layers,
    rope_parameters, eos_token_id, ... Norm weights and biases are random too, so that one left out shows.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tiny_tokenizer(folder)
    return folder


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": BOS_ID,
    }
    if family == "mistral":
        settings["sliding_window"] = None  # the class's default is 4096
    return _CONFIGS[family](**(settings | overrides))


def save_tiny_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens (any text tokenizes), with a small chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, START_TOKEN],  # ids 0, 1, 2
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN, pad_token=BOS_TOKEN
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
