"""Laws of the sampler: it is its slow definition, row by row, whatever stands beside a row."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.sampler import SampleRow, sample
from common.sampling import SamplingParams
from tests.support.plain_sampler import plain_adjusted, plain_token

VOCAB_SIZE = 40
token_ids = st.integers(0, VOCAB_SIZE - 1)
# Quarters: ties are frequent.
logit_rows = st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
penalties = st.sampled_from([0.0, 0.0, 0.5, -0.25, 2.0])
sampling_params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, VOCAB_SIZE, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=3),
    num_logprobs=st.sampled_from([None, None, 0, 5]),
)
sample_rows = st.builds(
    SampleRow,
    params=sampling_params,
    output_position=st.integers(0, 2**31 - 1),
    prompt_token_ids=st.lists(token_ids, max_size=8).map(tuple),
    output_token_ids=st.lists(token_ids, max_size=8).map(tuple),
)
batches = st.lists(st.tuples(logit_rows, sample_rows), min_size=1, max_size=6)


@given(batches)
@settings(max_examples=200, deadline=None)
def test_equals_the_plain_sampler(batch: list[tuple[list[float], SampleRow]]) -> None:
    tokens = sample(torch.tensor([logits for logits, _ in batch]), [row for _, row in batch])
    assert [token.token_id for token in tokens] == [plain_token(logits, row) for logits, row in batch]


@given(batches, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_the_others(batch: list[tuple[list[float], SampleRow]], random) -> None:
    """Tokens and log probabilities of a batch, bit for bit: in another order, and one row at a time."""
    together = sample(torch.tensor([logits for logits, _ in batch]), [row for _, row in batch])
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = sample(torch.tensor([batch[i][0] for i in order]), [batch[i][1] for i in order])
    assert shuffled == [together[i] for i in order]
    assert together == [sample(torch.tensor([logits]), [row])[0] for logits, row in batch]


@given(logit_rows, sample_rows)
@settings(max_examples=100, deadline=None)
def test_temperature_zero_is_the_arg_max_after_penalties(logits: list[float], row: SampleRow) -> None:
    greedy = row._replace(params=replace(row.params, temperature=0.0))
    assert sample(torch.tensor([logits]), [greedy])[0].token_id == int(np.argmax(plain_adjusted(logits, row)))


@given(logit_rows, sample_rows, st.sampled_from([{"top_k": 1}, {"min_p": 1.0, "top_k": 1}, {"top_p": 1e-12}]))
@settings(max_examples=100, deadline=None)
def test_one_candidate_is_the_greedy_choice(logits: list[float], row: SampleRow, narrow: dict[str, float]) -> None:
    one = row._replace(params=replace(row.params, temperature=1.0, **narrow))
    greedy = row._replace(params=replace(row.params, temperature=0.0))
    chosen, expected = sample(torch.tensor([logits, logits]), [one, greedy])
    assert chosen.token_id == expected.token_id


@given(logit_rows, sample_rows)
@settings(max_examples=50, deadline=None)
def test_logits_are_left_as_they_were(logits: list[float], row: SampleRow) -> None:
    tensor = torch.tensor([logits])
    before = tensor.clone()
    sample(tensor, [row])
    assert torch.equal(tensor, before)
