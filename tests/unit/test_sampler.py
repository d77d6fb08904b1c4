"""The sampler: each filter on a row small enough to see, its distribution, log probabilities, and odd values."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.model.sampler import SampleRow, sample
from common.sampling import OutputToken, SamplingParams
from tests.support.plain_sampler import plain_distribution, plain_logprobs

GREEDY = SamplingParams(temperature=0.0)
CHI_SQUARE_Z = 4.0  # a correct sampler passes one seed set with probability 0.99997; ours are fixed


def row_of(params: SamplingParams, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()):
    return SampleRow(params, position, prompt, output)


def token_of(logits: Sequence[float], row: SampleRow) -> int:
    return sample(torch.tensor([logits]), [row])[0].token_id


def tokens_seen(logits: Sequence[float], params: SamplingParams, num_seeds: int = 200) -> set[int]:
    rows = [row_of(replace(params, seed=seed)) for seed in range(num_seeds)]
    return {token.token_id for token in sample(torch.tensor([logits]).expand(num_seeds, -1), rows)}


class TestGreedy:
    def test_takes_the_largest(self) -> None:
        assert token_of([0.0, 3.0, 1.0], row_of(GREEDY)) == 1

    @pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, num_logprobs=0)], ids=["batched", "alone"])
    @pytest.mark.parametrize("vocab_size", [5, 1000, 49152])
    def test_among_equals_the_lowest_id(self, params: SamplingParams, vocab_size: int) -> None:
        """Sizes on both sides of a vectorized search's width."""
        logits = torch.zeros(3, vocab_size)
        logits[0, vocab_size // 2 :] = 1.0
        logits[1, vocab_size - 2 :] = 1.0
        tokens = sample(logits, [row_of(params)] * 3)
        assert [token.token_id for token in tokens] == [vocab_size // 2, vocab_size - 2, 0]

    def test_filters_change_nothing(self) -> None:
        filtered = replace(GREEDY, min_p=1.0, top_k=1, top_p=1e-9)
        assert token_of([2.0, 2.0, 1.0], row_of(filtered)) == 0


class TestPenalties:
    def test_repetition_divides_positive_and_multiplies_negative_logits(self) -> None:
        params = replace(GREEDY, repetition_penalty=2.0)
        assert token_of([3.0, 2.0], row_of(params, prompt=(0,))) == 1  # 1.5 against 2
        assert token_of([-1.0, -1.5], row_of(params, prompt=(0,))) == 1  # -2 against -1.5
        assert token_of([3.0, 2.0], row_of(params, output=(0, 0))) == 1  # once, however often it occurred

    def test_presence_counts_generated_tokens_once(self) -> None:
        params = replace(GREEDY, presence_penalty=1.0)
        assert token_of([3.0, 2.5], row_of(params, output=(0,))) == 1
        assert token_of([3.0, 1.5], row_of(params, output=(0, 0, 0))) == 0
        assert token_of([3.0, 2.5], row_of(params, prompt=(0,))) == 0

    def test_frequency_counts_each_generated_token(self) -> None:
        params = replace(GREEDY, frequency_penalty=1.0)
        assert token_of([3.0, 1.5], row_of(params, output=(0,))) == 0
        assert token_of([3.0, 1.5], row_of(params, output=(0, 0))) == 1
        assert token_of([3.0, 1.5], row_of(params, prompt=(0, 0))) == 0

    def test_negative_penalties_favour_repetition(self) -> None:
        params = replace(GREEDY, frequency_penalty=-1.0, presence_penalty=-1.0)
        assert token_of([3.0, 1.5], row_of(params, output=(1,))) == 1

    def test_bias_comes_after_the_penalties(self) -> None:
        params = replace(GREEDY, repetition_penalty=2.0, logit_bias={0: 1.0})
        assert token_of([2.0, 1.9], row_of(params, prompt=(0,))) == 0  # 2 / 2 + 1, not (2 + 1) / 2

    def test_a_vanishing_repetition_penalty_stays_finite(self) -> None:
        params = SamplingParams(repetition_penalty=5e-324, min_p=0.5, top_p=0.5)
        assert token_of([1.0, 2.0, 3.0], row_of(params, prompt=(1,))) == 1


class TestFilters:
    LOGITS = tuple(math.log(p) for p in (0.1, 0.4, 0.2, 0.3))

    def test_without_filters_every_token_comes(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams()) == {0, 1, 2, 3}

    def test_min_p_is_relative_to_the_likeliest(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(min_p=0.6)) == {1, 3}  # 0.3 / 0.4 passes, 0.2 / 0.4 does not

    def test_min_p_sees_the_probabilities_after_temperature(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(min_p=0.6, temperature=0.5)) == {1}  # (3/4)^2 = 0.5625

    def test_top_k(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(top_k=2)) == {1, 3}

    def test_top_k_among_equals_keeps_the_lowest_ids(self) -> None:
        assert tokens_seen([1.0, 1.0, 2.0, 1.0], SamplingParams(top_k=3, temperature=2.0)) == {0, 1, 2}

    def test_top_k_beyond_the_vocabulary_is_off(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(top_k=2**31 - 1)) == {0, 1, 2, 3}

    def test_top_p_keeps_the_token_that_reaches_it(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(top_p=0.5)) == {1, 3}
        assert tokens_seen(self.LOGITS, SamplingParams(top_p=0.39)) == {1}
        assert tokens_seen(self.LOGITS, SamplingParams(top_p=0.75)) == {1, 2, 3}

    def test_top_p_among_equals_keeps_the_lowest_ids(self) -> None:
        assert tokens_seen([0.0] * 8, SamplingParams(top_p=0.5)) == {0, 1, 2, 3}

    def test_top_p_counts_what_top_k_has_left(self) -> None:
        assert tokens_seen(self.LOGITS, SamplingParams(top_k=2, top_p=0.57)) == {1}  # 0.4 of 0.7 is 0.571
        assert tokens_seen(self.LOGITS, SamplingParams(top_k=2, top_p=0.58)) == {1, 3}

    def test_a_nucleus_of_most_of_the_vocabulary(self) -> None:
        """900 of 1,000 equal tokens."""
        rows = [row_of(SamplingParams(top_p=0.9, seed=seed)) for seed in range(2000)]
        seen = {token.token_id for token in sample(torch.zeros(1, 1000).expand(2000, -1), rows)}
        assert max(seen) == 899
        assert len(seen) > 700  # 900 (1 - e^(-2000 / 900)) = 802 expected

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
    def test_a_vanishing_temperature_is_greedy(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, min_p=0.1, top_p=0.9)
        assert tokens_seen([1.0, 3.0, 2.0], params, num_seeds=20) == {1}


CASES = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.3),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(
        temperature=1.2, min_p=0.02, top_k=12, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.2, logit_bias={3: 1.0, 4: -100.0},
    ),
}  # fmt: skip


class TestDistribution:
    NUM_DRAWS = 4000

    @pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
    @pytest.mark.parametrize("vary", ["seed", "position"])
    def test_frequencies_follow_the_filtered_distribution(self, params: SamplingParams, vary: str) -> None:
        """Over seeds at one position, and over positions of one seed."""
        logits = np.random.default_rng(7).normal(0, 2, 24).astype(np.float32)
        prompt, output = (1, 3, 5), (2, 2, 7)
        if vary == "seed":
            rows = [row_of(replace(params, seed=seed), 3, prompt, output) for seed in range(self.NUM_DRAWS)]
        else:
            rows = [row_of(replace(params, seed=99), position, prompt, output) for position in range(self.NUM_DRAWS)]
        tokens = sample(torch.from_numpy(logits).expand(self.NUM_DRAWS, -1), rows)
        counts = Counter(token.token_id for token in tokens)
        assert_chi_square(counts, plain_distribution(logits.tolist(), rows[0]), self.NUM_DRAWS)

    def test_consecutive_positions_are_independent(self) -> None:
        """Pairs of tokens of one seed at positions p and p + 1 follow the product of the distributions."""
        logits = [0.0, 0.5, 1.0, -1.0]
        rows = [row_of(SamplingParams(seed=5), position) for position in range(2 * self.NUM_DRAWS)]
        tokens = [t.token_id for t in sample(torch.tensor([logits]).expand(len(rows), -1), rows)]
        pairs = Counter((a, b) for a, b in zip(tokens[::2], tokens[1::2], strict=True))
        single = plain_distribution(logits, rows[0])
        product = {(a, b): single[a] * single[b] for a in single for b in single}
        assert_chi_square(pairs, product, self.NUM_DRAWS)

    def test_neighbouring_seeds_are_independent(self) -> None:
        logits = [0.0, 0.5, 1.0, -1.0]
        rows = [row_of(SamplingParams(seed=seed), 0) for seed in range(2 * self.NUM_DRAWS)]
        tokens = [t.token_id for t in sample(torch.tensor([logits]).expand(len(rows), -1), rows)]
        pairs = Counter((a, b) for a, b in zip(tokens[::2], tokens[1::2], strict=True))
        single = plain_distribution(logits, rows[0])
        assert_chi_square(pairs, {(a, b): single[a] * single[b] for a in single for b in single}, self.NUM_DRAWS)


class TestLogprobs:
    LOGITS = np.random.default_rng(1).normal(0, 3, 300).astype(np.float32)

    @pytest.mark.parametrize("num_top", [0, 1, 20])
    def test_are_of_the_raw_distribution(self, num_top: int) -> None:
        params = SamplingParams(temperature=0.5, top_k=3, logit_bias={0: 5.0}, num_logprobs=num_top)
        token = sample(torch.from_numpy(self.LOGITS)[None], [row_of(params)])[0]
        expected = plain_logprobs(token.token_id, self.LOGITS.tolist(), num_top)
        assert [i for i, _ in token.top_logprobs] == [i for i, _ in expected.top_logprobs]
        # fp64 sums of 300 terms in another order.
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-12)
        for (_, ours), (_, theirs) in zip(token.top_logprobs, expected.top_logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-12)

    def test_among_equals_the_lowest_ids_come_first(self) -> None:
        token = sample(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), [row_of(replace(GREEDY, num_logprobs=4))])[0]
        assert [i for i, _ in token.top_logprobs] == [1, 3, 0, 2]

    def test_more_than_the_vocabulary_gives_all_of_it(self) -> None:
        token = sample(torch.tensor([[1.0, 2.0]]), [row_of(replace(GREEDY, num_logprobs=20))])[0]
        assert [i for i, _ in token.top_logprobs] == [1, 0]

    def test_none_wanted_none_given(self) -> None:
        assert sample(torch.tensor([[1.0, 2.0]]), [row_of(GREEDY)]) == [OutputToken(1)]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), []) == []


def assert_chi_square(counts: Counter, distribution: dict, num_draws: int) -> None:
    """Observed counts against exact probabilities; cells expected fewer than five times are taken together."""
    assert set(counts) <= set(distribution)
    cells = {key: num_draws * p for key, p in distribution.items() if num_draws * p >= 5}
    statistic = sum((counts[key] - expected) ** 2 / expected for key, expected in cells.items())
    rare = num_draws - sum(cells.values())
    if rare >= 5:
        statistic += (num_draws - sum(counts[key] for key in cells) - rare) ** 2 / rare
    freedom = max(len(cells) - (rare < 5), 1)
    # Wilson-Hilferty: the cube root of chi-square over its degrees of freedom is close to normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < CHI_SQUARE_Z, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"
