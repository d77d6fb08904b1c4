"""Prompt lookup: what followed the last n tokens the last time they occurred in this text.

Source: Saxena, "Prompt Lookup Decoding" (2023). Needs no draft model; pays where text repeats itself.
"""

from collections.abc import Sequence


class PromptLookup:
    """Tries the longest match first: the last `max_ngram` tokens, then fewer, down to `min_ngram`."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, window: int = 4096) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._window = window

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        tokens = list(token_ids[-self._window :])
        for size in range(min(self._max_ngram, len(tokens) - 1), self._min_ngram - 1, -1):
            start = _last_occurrence(tokens, size)
            if start is not None:
                return tuple(tokens[start + size : start + size + max_tokens])
        return ()


def _last_occurrence(tokens: list[int], size: int) -> int | None:
    """Where the last `size` tokens occurred before, most recently; None when they did not."""
    pattern = tokens[-size:]
    last = pattern[-1]
    for end in range(len(tokens) - 2, size - 2, -1):
        if tokens[end] == last and tokens[end - size + 1 : end + 1] == pattern:
            return end - size + 1
    return None
