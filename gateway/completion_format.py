"""Answers of /v1/completions."""

from collections.abc import Sequence
from typing import ClassVar

from common.tokenizer import Tokenizer
from gateway.choice_text import LocatedToken, Piece
from gateway.token_text import alternatives, chosen_logprob, spell
from gateway.wire_json import Json


class CompletionFormat:
    body_kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def opening(self, _index: int, /) -> Json | None:
        return None

    def whole(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens) if self._has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def part(self, index: int, piece: Piece) -> Json:
        return self.whole(index, piece)

    def _logprobs(self, located: Sequence[LocatedToken]) -> Json:
        """Lists with one item per token; offsets are characters of the choice's text."""
        tokens = [held.token for held in located]
        return {
            "tokens": [spell(self._tokenizer.token_bytes(token.token_id)) for token in tokens],
            "token_logprobs": [chosen_logprob(token) for token in tokens],
            "top_logprobs": [self._top_logprobs(held) for held in located],
            "text_offset": [held.text_offset for held in located],
        }

    def _top_logprobs(self, held: LocatedToken) -> dict[str, float]:
        """By spelling, most likely first, and always with the chosen token; of equal spellings the likelier stays."""
        token = held.token
        top: dict[str, float] = {}
        for content, logprob in alternatives(self._tokenizer, token):
            top.setdefault(spell(content), logprob)
        top.setdefault(spell(self._tokenizer.token_bytes(token.token_id)), chosen_logprob(token))
        return top
