"""`tokenizer_meta.json`: what a gateway must know of a model beside its `tokenizer.json`."""

import json
from dataclasses import dataclass
from typing import Any, Self

from common.errors import ModelLoadError

FILE_NAME = "tokenizer_meta.json"


@dataclass(frozen=True, slots=True)
class TokenizerMeta:
    """Written once by the model's conversion; read by every gateway."""

    model_name: str
    max_model_len: int  # prompt and output tokens together
    vocab_size: int  # rows of the model's embedding; token ids are below it
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    bos_token_id: int | None
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Raises ModelLoadError naming what is missing or of a wrong type. Unknown keys belong to newer workers."""
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise ModelLoadError(f"{FILE_NAME} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ModelLoadError(f"{FILE_NAME} holds a {type(fields).__name__}; an object was expected")
        return cls(
            model_name=_take(fields, "model_name", str),
            max_model_len=_take(fields, "max_model_len", int),
            vocab_size=_take(fields, "vocab_size", int),
            eos_token_ids=_take_ids(fields, "eos_token_ids"),
            special_token_ids=_take_ids(fields, "special_token_ids"),
            bos_token_id=_take(fields, "bos_token_id", int, type(None)),
            bos_token=_take(fields, "bos_token", str, type(None)),
            eos_token=_take(fields, "eos_token", str, type(None)),
            chat_template=_take(fields, "chat_template", str, type(None)),
        )


def _take(fields: dict[str, Any], key: str, *types: type) -> Any:
    if key not in fields:
        raise ModelLoadError(f"{FILE_NAME} lacks {key!r}")
    value = fields[key]
    if type(value) not in types:
        expected = " or ".join(kind.__name__ for kind in types)
        raise ModelLoadError(f"{FILE_NAME}: {key} is {value!r}; expected {expected}")
    return value


def _take_ids(fields: dict[str, Any], key: str) -> frozenset[int]:
    ids = _take(fields, key, list)
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelLoadError(f"{FILE_NAME}: {key} is {ids!r}; expected a list of token ids")
    return frozenset(ids)
