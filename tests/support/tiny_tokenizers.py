"""Small tokenizers for tests of text, made without torch: a byte-level one and one with byte fallback."""

import json
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from common.tokenizer import Tokenizer

MODEL_NAME = "tiny-model"
MAX_MODEL_LEN = 256
BOS_TOKEN, EOS_TOKEN, START_TOKEN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
BOS_ID, EOS_ID, START_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRAINING_TEXT = (
    "The engine takes a prompt, compresses it in one stroke and delivers the answer in the other.",
    "Größe, façade, naïve, señor: letters beyond the first hundred and twenty-eight are bytes as well.",
    "What is the capital of France? The capital of France is Paris, and it stands on the river Seine.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 100 1000 10000; if x < 3: print(x + 1)",
)


def meta_json(**overrides: Any) -> bytes:
    """A `tokenizer_meta.json` for the byte-level tokenizer; its vocabulary has a few rows without a token."""
    fields = {
        "model_name": MODEL_NAME,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": byte_level().get_vocab_size() + 8,
        "eos_token_ids": [EOS_ID],
        "special_token_ids": [BOS_ID, EOS_ID, START_ID],
        "bos_token_id": BOS_ID,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(fields | overrides).encode()


def tiny_tokenizer(**overrides: Any) -> Tokenizer:
    """Byte-level BPE: any text tokenizes, and tokens may end in the middle of a character."""
    return Tokenizer(byte_level().to_str().encode(), meta_json(**overrides))


def tiny_byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way: spaces are ▁, and characters outside the vocabulary are spelled as byte tokens."""
    reference = byte_fallback()
    return Tokenizer(
        reference.to_str().encode(), meta_json(vocab_size=reference.get_vocab_size(), special_token_ids=[0, 1, 2])
    )


@lru_cache
def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, START_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    tokenizer.add_tokens(["<tool é>", "🦊"])  # added tokens that are text, with characters outside the alphabet
    return tokenizer


@lru_cache
def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "a", "b", "c", "▁a", "bc", "▁abc", "é"]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
