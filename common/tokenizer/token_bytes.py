"""The bytes that each token stands for, read from the decoder that `tokenizer.json` describes.

Text as bytes per token is what makes streaming exact: the bytes of a stream are the tokens' bytes one after the other.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from common.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, or a Sequence of Replace (of a string), ByteFallback, Fuse and Strip (of spaces)"

TokenToBytes = Callable[[str], bytes]


def token_to_bytes(tokenizer_json: bytes) -> TokenToBytes:
    """A function from a token, as the vocabulary spells it, to its bytes in the middle of a text.

    The space that some decoders strip at the very start of a text is kept: an output continues its prompt.
    Raises ModelLoadError, naming the decoder, where one is unknown.
    """
    decoder = json.loads(tokenizer_json).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level
    replacements: dict[str, str] = {}
    has_byte_fallback = False
    for step in steps:
        if step["type"] == "ByteFallback":
            has_byte_fallback = True
        elif _is_dropped_at_start_only(step) or step["type"] == "Fuse":
            continue
        else:
            replacements |= _replacement(step)
    return partial(_replace, replacements, has_byte_fallback)


def _is_dropped_at_start_only(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0


def _replacement(step: Mapping[str, Any]) -> dict[str, str]:
    if step["type"] == "Metaspace":
        return {step["replacement"]: " "}
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return {step["pattern"]["String"]: step["content"]}
    raise ModelLoadError(f"tokenizer.json has a decoder {step['type']!r} that is not supported; known: {_SUPPORTED}")


def _replace(replacements: Mapping[str, str], has_byte_fallback: bool, token: str) -> bytes:
    byte_token = _BYTE_TOKEN.fullmatch(token) if has_byte_fallback else None
    if byte_token:
        return bytes([int(byte_token.group(1), 16)])
    for pattern, content in replacements.items():
        token = token.replace(pattern, content)
    return token.encode()


def _byte_level(token: str) -> bytes:
    """Each character is one byte; a token with any other character (an added one) stands for itself."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _make_byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _make_byte_of_char()
