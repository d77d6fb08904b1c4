"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import ClassVar

from common.tokenizer import Tokenizer
from gateway.choice_text import LocatedToken, Piece
from gateway.token_text import alternatives, chosen_logprob, spell
from gateway.wire_json import Json


class ChatFormat:
    body_kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.tokens) if piece.tokens else None,
            "finish_reason": piece.finish_reason,
        }

    def whole(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.tokens) if self._has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, located: Sequence[LocatedToken]) -> Json:
        return {"content": [self._token(held) for held in located], "refusal": None}

    def _token(self, held: LocatedToken) -> Json:
        chosen = _entry(self._tokenizer.token_bytes(held.token.token_id), chosen_logprob(held.token))
        top = [_entry(content, logprob) for content, logprob in alternatives(self._tokenizer, held.token)]
        return chosen | {"top_logprobs": top}


def _entry(content: bytes, logprob: float) -> Json:
    return {"token": spell(content), "logprob": logprob, "bytes": list(content)}
