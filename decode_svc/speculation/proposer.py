"""The source of guesses, behind one small interface."""

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Guesses for the tokens that follow `token_ids` (prompt and output): at most `max_tokens`, possibly none."""


class NoProposer:
    """Speculation off."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()
