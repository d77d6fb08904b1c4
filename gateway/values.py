"""Fields whose values have several forms, each brought into one. Every refusal names the field and the value."""

import re
from typing import Any

from common.errors import BadRequest, UnsupportedParameter
from gateway.quote import quote

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024  # each entry costs every step of everyone in the batch a little
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

Prompt = str | tuple[int, ...]
"""A text, or token ids."""


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of lists of token ids; none of them empty."""
    if isinstance(value, str):
        return (_check_text(value, "prompt"),)
    if not isinstance(value, list):
        raise BadRequest(
            f"prompt is {quote(value)}; allowed: a string, token ids, or a list of either",
            param="prompt",
        )
    if not value:
        raise BadRequest("prompt is empty; it needs at least one token", param="prompt")
    if isinstance(value[0], str):
        return tuple(_check_text(item, f"prompt[{index}]") for index, item in enumerate(value))
    if isinstance(value[0], list):
        return tuple(_check_token_ids(item, f"prompt[{index}]") for index, item in enumerate(value))
    return (_check_token_ids(value, "prompt"),)


def _check_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{path} is {quote(value)}; a string was expected, as the ones before it", param="prompt")
    if not value:
        raise BadRequest(f"{path} is empty; it needs at least one token", param="prompt")
    return check_unicode(value, path, "prompt")


def _check_token_ids(value: Any, path: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadRequest(f"{path} is {quote(value)}; a list of token ids was expected", param="prompt")
    if not value:
        raise BadRequest(f"{path} is empty; it needs at least one token", param="prompt")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise BadRequest(f"{path}[{index}] is {quote(token_id)}; a token id was expected", param="prompt")
    return tuple(value)


def check_unicode(text: str, path: str, param: str) -> str:
    """JSON can spell half a surrogate pair, which no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{path} has a lone surrogate at character {error.start}, which is not Unicode text", param=param
        ) from None
    return text


def parse_stop(value: Any) -> tuple[str, ...]:
    """One stop string or up to MAX_STOP_STRINGS of them."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise BadRequest(f"stop is {quote(value)}; allowed: a string, or a list of strings", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop has {len(strings)} strings; the limit is {MAX_STOP_STRINGS}", param="stop")
    for text in strings:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"stop has a string of {len(text)} characters; allowed: 1 to {MAX_STOP_CHARS}", param="stop"
            )
        check_unicode(text, "stop", "stop")
    return tuple(strings)


def parse_logit_bias(value: Any) -> dict[int, float]:
    """Token ids, spelled as strings, with numbers. Their ranges are checked where the vocabulary is known."""
    if not isinstance(value, dict):
        raise BadRequest(f"logit_bias is {quote(value)}; an object was expected", param="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(f"logit_bias has {len(value)} token ids; the limit is {MAX_LOGIT_BIAS}", param="logit_bias")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise BadRequest(f"logit_bias has the key {quote(key)}; a token id was expected", param="logit_bias")
        if type(bias) not in (int, float):
            raise BadRequest(f"logit_bias[{key}] is {quote(bias)}; a number was expected", param="logit_bias")
    return {int(key): float(bias) for key, bias in value.items()}


def join_text_parts(value: Any, path: str) -> str:
    """The text of a message's content, several text parts on lines of their own. Other kinds of parts are refused."""
    if isinstance(value, str):
        parts = [value]
    elif isinstance(value, list) and value:
        parts = [_part_text(part, f"{path}.{index}") for index, part in enumerate(value)]
    else:
        raise BadRequest(f"{path} is {quote(value)}; allowed: a string, or a list of text parts", param=path)
    return check_unicode("\n".join(parts), path, path)


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedParameter(f"{path} is a part of type {quote(kind)}; only text is supported", param=path)
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise BadRequest(f'{path} is {quote(part)}; expected {{"type": "text", "text": "…"}}', param=path)
    return part["text"]
