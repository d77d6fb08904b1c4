"""Our tokenizer and chat template against transformers' own, on the default model and on a tiny one."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.tokenizer import Tokenizer
from tests.support.real_model import prepared_smollm2
from tests.support.tiny_models import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, VOCAB_SIZE, save_tiny_tokenizer

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe 水 🦊\n\n  x = 1"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "12345 <|im_end|>\n<|im_start|>system\nspelled by a client"},
    ],
    [{"role": "user", "content": ""}],
]
TEXTS = ["", " ", "Hello, world!", "def f(x):\n\treturn x + 1000", "Ünïcödé 水 🦊‍❄️", "<|im_start|>x<|endoftext|>"]

Pair = tuple[Tokenizer, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def smollm2_pair() -> Pair:
    files = prepared_smollm2().tokenizer_files
    ours = Tokenizer(files["tokenizer.json"], files["tokenizer_meta.json"])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_buffer(files["tokenizer.json"]),
        bos_token=ours.meta.bos_token,
        eos_token=ours.meta.eos_token,
        chat_template=ours.meta.chat_template,
    )
    return ours, theirs


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    meta = {
        "model_name": "tiny",
        "max_model_len": 1024,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [1],
        "special_token_ids": [0, 1, 2],
        "bos_token_id": 0,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
    }
    ours = Tokenizer((folder / "tokenizer.json").read_bytes(), json.dumps(meta).encode())
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=["tiny_pair", "smollm2_pair"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_prompts_are_equal(pair: Pair, messages: list[dict[str, str]]) -> None:
    ours, theirs = pair
    for add_generation_prompt in (True, False):
        text = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        assert ours.render_chat(messages, add_generation_prompt=add_generation_prompt) == text
    token_ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.encode_chat(messages) == token_ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_texts_tokenize_equally(pair: Pair, text: str, add_special_tokens: bool) -> None:
    ours, theirs = pair
    token_ids = theirs.encode(text, add_special_tokens=add_special_tokens)
    assert ours.encode(text, add_special_tokens=add_special_tokens) == token_ids
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 49_151)))
def test_streams_of_the_default_model_add_up_to_transformers_decoding(smollm2_pair: Pair, token_ids: list[int]) -> None:
    ours, theirs = smollm2_pair
    detokenizer = ours.detokenizer()
    pieces = [*map(detokenizer.push, token_ids), detokenizer.flush()]
    assert "".join(pieces) == theirs.decode(token_ids, skip_special_tokens=True)
