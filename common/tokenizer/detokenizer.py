"""Token ids to text, one token at a time, in pieces that add up to the text of the whole."""

import codecs
from collections.abc import Callable


class IncrementalDetokenizer:
    """One stream's state: the bytes of a UTF-8 character that is not whole yet.

    The pieces, with the flush at the end, are together the bytes of all tokens decoded as UTF-8, with U+FFFD for each
    maximal part that is none. O(1) amortized per token.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` gives a token's bytes in the text; none for special tokens."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token makes whole; it may be empty."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """At the end of the stream: U+FFFD where a character stayed unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)
