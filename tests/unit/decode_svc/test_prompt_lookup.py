from hypothesis import given
from hypothesis import strategies as st

from decode_svc.speculation.prompt_lookup import PromptLookup


def test_proposes_what_followed_the_last_occurrence() -> None:
    lookup = PromptLookup(max_ngram=3, min_ngram=2)
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2], 3) == (5, 6, 7)


def test_a_longer_match_wins_over_a_later_one() -> None:
    lookup = PromptLookup(max_ngram=3, min_ngram=2)
    assert lookup.propose([7, 1, 2, 8, 8, 0, 1, 2, 5, 7, 1, 2], 2) == (8, 8)


def test_proposes_nothing_where_nothing_repeats() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5], 4) == ()
    assert PromptLookup().propose([1], 4) == ()
    assert PromptLookup().propose([], 4) == ()


def test_a_match_beyond_the_window_is_not_looked_for() -> None:
    text = [1, 2, 3, *range(10, 30), 1, 2]
    assert PromptLookup(window=10).propose(text, 1) == ()
    assert PromptLookup(window=100).propose(text, 1) == (3,)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_a_proposal_is_a_run_of_the_text_after_its_own_end(text: list[int], count: int, max_ngram: int) -> None:
    proposal = PromptLookup(max_ngram=max_ngram, min_ngram=1).propose(text, count)
    assert len(proposal) <= count
    if proposal:
        run = (text[-1], *proposal)
        assert any(tuple(text[i : i + len(run)]) == run for i in range(len(text)))
