"""Stop strings over a stream of text: nothing that may belong to a stop is given out before it is known.

The match that completes first wins; of several that complete at the same character, the longest. So the result is a
function of the text alone, never of how tokens cut it. Each string has its own Knuth-Morris-Pratt automaton: amortized
O(1) per character and string, whatever the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One stop string with its failure table: `borders[i]` is the longest proper border of its first i characters."""

    text: str
    borders: tuple[int, ...]

    def advance(self, matched: int, char: str) -> int:
        """How many of the pattern's characters are matched after `char`; `matched` is below its length."""
        while matched and self.text[matched] != char:
            matched = self.borders[matched]
        return matched + 1 if self.text[matched] == char else 0


class StopStrings:
    """Compiled once per request and shared by its choices. Precondition: no string is empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string matches everywhere"
        self.patterns = tuple(_compile(text) for text in strings)

    def matcher(self) -> "StopMatcher":
        return StopMatcher(self)


class StopMatcher:
    """One stream's state: the characters held back, and how far each stop string is matched."""

    def __init__(self, stops: StopStrings) -> None:
        self._patterns = stops.patterns
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self.is_stopped = False

    @property
    def num_held_chars(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        """What may be given out now. After a match (`is_stopped`) that is the text before it; the rest is dropped."""
        assert not self.is_stopped, "text after the stop"
        if not self._patterns:
            return text
        buffer = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            stop_length = self._advance(char)
            if stop_length:
                self.is_stopped = True
                self._held = ""
                return buffer[: index - stop_length]
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop that `char` completes, or 0."""
        complete = 0
        for index, pattern in enumerate(self._patterns):
            self._matched[index] = pattern.advance(self._matched[index], char)
            if self._matched[index] == len(pattern.text):
                complete = max(complete, len(pattern.text))
        return complete


def _compile(text: str) -> _Pattern:
    borders = [0, 0]
    for char in text[1:]:
        matched = borders[-1]
        while matched and text[matched] != char:
            matched = borders[matched]
        borders.append(matched + 1 if text[matched] == char else 0)
    return _Pattern(text, tuple(borders))
