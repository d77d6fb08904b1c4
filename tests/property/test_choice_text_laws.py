"""Laws of a choice's text: what a client gets depends on the tokens alone, not on their company or on streaming."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from common.sampling import FinishReason, OutputToken, SamplingParams
from common.tokenizer import StopStrings
from gateway.choice_text import ChoiceText, LocatedToken, Piece, join_pieces
from gateway.choices import ChoiceRunner
from gateway.generation import Generation, TokenDelta
from gateway.record import Choice
from tests.support.fake_dispatcher import FakeDispatcher
from tests.support.tiny_tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
token_ids = st.lists(
    # Mostly text with short characters that stop strings can meet, and some of everything.
    st.sampled_from(TOKENIZER.encode("abé水", add_special_tokens=False))
    | st.integers(0, TOKENIZER.meta.vocab_size - 1),
    max_size=20,
)
stop_strings = st.lists(st.text(alphabet="abé水\ufffd", min_size=1, max_size=3), max_size=3)
finish_reasons = st.sampled_from(FinishReason)


@st.composite
def cuts(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    """The ids in groups, some of them empty."""
    groups: list[list[int]] = [[]]
    for token_id in ids:
        groups.extend([] for _ in range(draw(st.integers(0, 2))))
        groups[-1].append(token_id)
    return groups


async def run(groups: Sequence[Sequence[int]], stops: list[str], reason: FinishReason) -> tuple[list[Piece], Choice]:
    deltas = [TokenDelta(tuple(map(OutputToken, group))) for group in groups[:-1]]
    deltas.append(TokenDelta(tuple(map(OutputToken, groups[-1])), reason))
    choice = Choice(0, 0, Generation(RequestId("r"), (1,), SamplingParams(), "default"))
    compiled = StopStrings(stops)
    runner = ChoiceRunner(
        FakeDispatcher(lambda _: deltas), lambda: ChoiceText(TOKENIZER, compiled, keeps_tokens=True), lambda: 0.0
    )
    pieces: list[Piece] = []

    async def keep(_: Choice, piece: Piece) -> None:
        pieces.append(piece)

    await runner.run([choice], keep)
    return pieces, choice


@given(token_ids, stop_strings, finish_reasons, st.data())
async def test_any_grouping_gives_the_same_answer(
    ids: list[int], stops: list[str], reason: FinishReason, data: st.DataObject
) -> None:
    alone, choice_alone = await run([*([token_id] for token_id in ids), []], stops, reason)
    grouped, choice_grouped = await run(data.draw(cuts(ids)), stops, reason)
    assert join_pieces(alone) == join_pieces(grouped)
    assert choice_alone.num_output_tokens == choice_grouped.num_output_tokens
    assert choice_alone.finish_reason == choice_grouped.finish_reason


@given(token_ids, stop_strings, finish_reasons, st.data())
async def test_the_answer_is_the_decoding_cut_before_the_first_stop(
    ids: list[int], stops: list[str], reason: FinishReason, data: st.DataObject
) -> None:
    pieces, choice = await run(data.draw(cuts(ids)), stops, reason)
    whole = TOKENIZER.decode(ids)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    if not ends:
        assert join_pieces(pieces).text == whole
        assert choice.finish_reason == reason
        assert choice.num_output_tokens == len(ids)
        return
    end, start = min(ends)
    assert join_pieces(pieces).text == whole[:start]
    assert choice.finish_reason == FinishReason.STOP
    # The fewest tokens whose text, with nothing held back any more, has the whole stop string.
    assert choice.num_output_tokens == next(
        n for n in range(len(ids) + 1) if n == len(ids) or len(settled(ids[:n])) >= end
    )


def settled(ids: Sequence[int]) -> str:
    """Text that no later token can change."""
    detokenizer = TOKENIZER.detokenizer()
    return "".join(map(detokenizer.push, ids))


@given(token_ids, stop_strings, finish_reasons, st.data())
async def test_every_delivered_token_is_told_once_where_its_text_begins(
    ids: list[int], stops: list[str], reason: FinishReason, data: st.DataObject
) -> None:
    pieces, choice = await run(data.draw(cuts(ids)), stops, reason)
    told: list[LocatedToken] = [token for piece in pieces for token in piece.tokens]
    assert [held.token.token_id for held in told] == ids[: choice.num_output_tokens]
    text = join_pieces(pieces).text
    assert [held.text_offset for held in told] == [min(len(settled(ids[:n])), len(text)) for n in range(len(told))]
    num_chars = 0
    for piece in pieces[:-1]:
        assert all(num_chars <= held.text_offset < num_chars + len(piece.text) for held in piece.tokens)
        num_chars += len(piece.text)
