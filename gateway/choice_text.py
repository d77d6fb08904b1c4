"""One choice's tokens as text: pieces that add up to the answer, cut before a stop string, with their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import FinishReason, OutputToken
from common.tokenizer import StopStrings, Tokenizer


@dataclass(frozen=True, slots=True)
class LocatedToken:
    """`text_offset`: how many characters of the choice's text were whole before this token."""

    token: OutputToken
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice's text, or all of it. Tokens are given only where log probabilities were asked for."""

    text: str
    tokens: tuple[LocatedToken, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def is_visible(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """The whole of a finished choice."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason)


class ChoiceText:
    """The same tokens give the same text and the same end, however they are grouped."""

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings, *, keeps_tokens: bool) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = stops.matcher()
        self._keeps_tokens = keeps_tokens
        self._ready: list[str] = []
        self._waiting: list[LocatedToken] = []
        self._num_whole_chars = 0  # in all tokens so far
        self._num_ready_chars = 0  # of these, given out or ready to be

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete; no more tokens may follow."""
        return self._matcher.is_stopped

    def push(self, token: OutputToken) -> None:
        if self._keeps_tokens:
            self._waiting.append(LocatedToken(token, self._num_whole_chars))
        self._append(self._detokenizer.push(token.token_id))

    def finish(self) -> None:
        """No more tokens come: what was held back, as a possible beginning, is text."""
        if not self.is_stopped:
            self._append(self._detokenizer.flush())
        self._give(self._matcher.flush())

    def take(self, finish_reason: FinishReason | None) -> Piece:
        """What became ready since the last call. A token comes with the text that it begins, or at the end."""
        is_last = finish_reason is not None
        num_tokens = sum(1 for held in self._waiting if is_last or held.text_offset < self._num_ready_chars)
        tokens, self._waiting = self._waiting[:num_tokens], self._waiting[num_tokens:]
        text = "".join(self._ready)
        self._ready.clear()
        return Piece(text, tuple(self._within_text(held) for held in tokens), finish_reason)

    def _append(self, text: str) -> None:
        self._num_whole_chars += len(text)
        self._give(self._matcher.push(text))

    def _give(self, text: str) -> None:
        self._ready.append(text)
        self._num_ready_chars += len(text)

    def _within_text(self, held: LocatedToken) -> LocatedToken:
        """Tokens of the stop string lie behind the text's end."""
        return LocatedToken(held.token, min(held.text_offset, self._num_ready_chars))
