"""Tokenizers from their two files: what they accept, what they refuse, what text and tokens become."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from common.errors import BadRequest, ModelLoadError
from common.tokenizer import ChatTemplate, Tokenizer, TokenizerMeta
from tests.support.tiny_tokenizers import (
    BOS_ID,
    EOS_ID,
    EOS_TOKEN,
    START_ID,
    byte_level,
    meta_json,
    tiny_byte_fallback_tokenizer,
    tiny_tokenizer,
)

USER: list[dict[str, str]] = [{"role": "user", "content": "Hi <b>"}]


def test_special_tokens_are_found_in_text_and_hidden_from_it() -> None:
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False)
    assert (token_ids[0], token_ids[-1]) == (START_ID, EOS_ID)
    assert tokenizer.decode(token_ids) == "a"
    assert tokenizer.text_bytes(START_ID) == b""
    assert tokenizer.token_bytes(START_ID) == b"<|im_start|>"


def test_a_token_that_ends_requests_is_hidden_whatever_its_flags() -> None:
    text = "a"
    (token_id,) = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert tiny_tokenizer(eos_token_ids=[token_id]).decode([token_id]) == ""
    assert tiny_tokenizer().decode([token_id]) == text


def test_ids_without_a_token_are_nothing() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode([tokenizer.meta.vocab_size - 1, 10**9]) == ""


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    library.enable_truncation(2)
    library.enable_padding(length=64)
    tokenizer = Tokenizer(library.to_str().encode(), meta_json())
    assert tokenizer.encode("a b c d e", add_special_tokens=True) == tiny_tokenizer().encode(
        "a b c d e", add_special_tokens=True
    )


def test_special_tokens_around_a_text_are_added_when_asked() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS_ID)]
    )
    tokenizer = Tokenizer(library.to_str().encode(), meta_json())
    assert tokenizer.encode("a", add_special_tokens=True)[0] == BOS_ID
    assert tokenizer.encode_chat(USER)[0] == START_ID, "the template wrote what it wants"


def test_an_output_of_sentencepiece_keeps_the_space_it_begins_with() -> None:
    tokenizer = tiny_byte_fallback_tokenizer()
    assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == " abc"


def test_a_metaspace_decoder_is_understood() -> None:
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library.to_str().encode(), meta_json(special_token_ids=[], eos_token_ids=[]))
    assert tokenizer.decode([1, 0, 1]) == "b ab"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Sequence([decoders.CTC()])])
def test_a_decoder_that_is_not_known_is_named(decoder: Any) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.decoder = decoder
    with pytest.raises(ModelLoadError, match=r"'(WordPiece|CTC)'.*ByteLevel"):
        Tokenizer(library.to_str().encode(), meta_json())


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 5}'])
def test_a_broken_tokenizer_file_is_named(content: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(content, meta_json())


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"vocab_size": "5"}, "vocab_size is '5'; expected int"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"eos_token_ids": [1, "2"]}, "eos_token_ids"),
        ({"chat_template": {}}, "chat_template"),
        ({"model_name": None}, "model_name"),
    ],
)
def test_a_wrong_value_in_the_description_is_named(overrides: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        TokenizerMeta.from_json(meta_json(**overrides))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_broken_description_is_named(content: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer_meta\.json"):
        TokenizerMeta.from_json(content)


def test_a_missing_field_of_the_description_is_named() -> None:
    fields = json.loads(meta_json())
    del fields["max_model_len"]
    with pytest.raises(ModelLoadError, match="lacks 'max_model_len'"):
        TokenizerMeta.from_json(json.dumps(fields).encode())


def test_fields_of_a_newer_description_are_left_alone() -> None:
    assert TokenizerMeta.from_json(meta_json(some_new_field=1)).eos_token == EOS_TOKEN


def render(template: str, messages: list[dict[str, str]] = USER) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}|{{ messages[0].role }}", "<s>|user"),
        ("{% if tools is none and not documents %}none{% endif %}", "none"),
        ("  {% if true %}\nline\n  {% endif %}\nend", "line\nend"),
        ("{{ messages[0].content | tojson }}", '"Hi <b>"'),
        ("{{ {'ü': [1, true]} | tojson(indent=1) }}", '{\n "ü": [\n  1,\n  true\n ]\n}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% if add_generation_prompt %}>{% endif %}", ">"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_chat_templates_rely_on(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].content.x.y }}",
        "{{ messages[0].role + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_bad_request(template: str) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        render(template)


def test_a_template_that_does_not_compile_is_found_at_the_start() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        tiny_tokenizer(chat_template="{% if %}")


def test_messages_are_not_changed_by_a_template() -> None:
    messages = [{"role": "user", "content": "x"}]
    render("{% for message in messages %}{{ message.role }}{% endfor %}", messages)
    assert messages == [{"role": "user", "content": "x"}]
