"""How tokens are spelled beside their log probabilities."""

from collections.abc import Iterator

from common.sampling import OutputToken
from common.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON cannot hold."""


def spell(content: bytes) -> str:
    """The token's text; `bytes:\\xe2\\x80` where it is not UTF-8 by itself."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def alternatives(tokenizer: Tokenizer, token: OutputToken) -> Iterator[tuple[bytes, float]]:
    """The most likely tokens at this position, with their log probabilities."""
    for token_id, logprob in token.top_logprobs:
        yield tokenizer.token_bytes(token_id), finite(logprob)


def chosen_logprob(token: OutputToken) -> float:
    assert token.logprob is not None, "log probabilities were asked for"
    return finite(token.logprob)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
