"""Verification by equality: a draft token stands when it is what the target itself chooses at that position."""

from collections.abc import Sequence

from common.sampling import OutputToken


def count_accepted(draft_token_ids: Sequence[int], choices: Sequence[OutputToken]) -> int:
    """How many leading drafts equal the target's choices. Precondition: one choice more than drafts.

    `choices[i]` was made with drafts 0 .. i-1 as history, so `choices[: accepted + 1]` is what would have been sampled
    without speculation: the accepted tokens and the bonus token.
    """
    assert len(choices) == len(draft_token_ids) + 1
    for index, draft in enumerate(draft_token_ids):
        if choices[index].token_id != draft:
            return index
    return len(draft_token_ids)
