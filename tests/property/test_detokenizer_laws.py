"""Laws of streaming text: the pieces are the whole, whatever the tokens and however they are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tokenizer import StopStrings, Tokenizer
from tests.support.tiny_tokenizers import byte_fallback, byte_level, tiny_byte_fallback_tokenizer, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
BYTE_FALLBACK = tiny_byte_fallback_tokenizer()

# Few characters make stop strings that match, overlap and nest.
short_texts = st.text(alphabet="abé", min_size=1, max_size=5)


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.meta.vocab_size + 10)))
def test_pieces_add_up_to_the_library_s_own_decoding_for_any_ids(token_ids: list[int]) -> None:
    text = "".join(stream(BYTE_LEVEL, token_ids))
    assert text == BYTE_LEVEL.decode(token_ids) == byte_level().decode(token_ids)


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    # The added tokens stand for text too, but the special ones do not.
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert "".join(stream(BYTE_LEVEL, token_ids)) == text


@given(st.lists(st.integers(0, BYTE_FALLBACK.meta.vocab_size + 10)))
def test_byte_fallback_pieces_add_up_to_the_whole(token_ids: list[int]) -> None:
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


@given(st.text(alphabet="abc é水🦊"), st.text(alphabet="abc é水🦊"))
def test_byte_fallback_output_continues_the_prompt_as_the_library_decodes_it(prompt: str, output: str) -> None:
    library = byte_fallback()
    prompt_ids, output_ids = library.encode("x" + prompt).ids, library.encode(output).ids
    text = "".join(stream(BYTE_FALLBACK, output_ids))
    assert library.decode(prompt_ids) + text == library.decode(prompt_ids + output_ids)


def first_completed_stop(text: str, stops: list[str]) -> str | None:
    """The slow, obvious rule: the text before the stop that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return None


@given(st.text(alphabet="abé", max_size=30), st.lists(short_texts, max_size=4), st.data())
def test_stop_matching_depends_on_the_text_alone(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopStrings(stops).matcher()
    given_out, rest = "", text
    while rest and not matcher.is_stopped:
        length = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:length], rest[length:]
        given_out += matcher.push(piece)
    expected = first_completed_stop(text, stops)
    assert matcher.is_stopped == (expected is not None)
    assert given_out + matcher.flush() == (text if expected is None else expected)


@given(st.text(alphabet="abé", max_size=30), st.lists(short_texts, min_size=1, max_size=4))
def test_only_a_possible_start_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops).matcher()
    for index, char in enumerate(text, start=1):
        matcher.push(char)
        if matcher.is_stopped:
            return
        possible = (length for length in range(index, -1, -1) if starts_a_stop(text[index - length : index], stops))
        assert matcher.num_held_chars == next(possible)


def starts_a_stop(suffix: str, stops: list[str]) -> bool:
    return any(stop != suffix and stop.startswith(suffix) for stop in stops)


def test_an_empty_stop_string_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])
