"""The sampler's definition, one token at a time in plain Python: slow and obvious, for comparison.

It shares no code with `common.model.sampler` but the noise, which has known answers of its own.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from common.model.gumbel import gumbel_noise
from common.model.sampler import SampleRow
from common.sampling import OutputToken


def plain_token(logits: Sequence[float], row: SampleRow) -> int:
    """What `sample` must choose. `logits` are fp32 values."""
    params = row.params
    adjusted = plain_adjusted(logits, row)
    if params.temperature == 0.0:
        return min(range(len(adjusted)), key=lambda i: (-adjusted[i], i))
    scores = plain_filtered(adjusted, row)
    noisy = {i: score + _noise(row, i) for i, score in scores.items()}
    return min(noisy, key=lambda i: (-noisy[i], i))


def plain_adjusted(logits: Sequence[float], row: SampleRow) -> list[float]:
    """Penalties and bias."""
    params = row.params
    adjusted = [float(logit) for logit in logits]
    for i in {*row.prompt_token_ids, *row.output_token_ids}:
        if adjusted[i] > 0:
            adjusted[i] /= params.repetition_penalty
        else:
            adjusted[i] *= params.repetition_penalty
    for i, count in Counter(row.output_token_ids).items():
        adjusted[i] -= count * params.frequency_penalty + params.presence_penalty
    for i, bias in params.logit_bias.items():
        adjusted[i] += bias
    return adjusted


def plain_filtered(adjusted: Sequence[float], row: SampleRow) -> dict[int, float]:
    """token id -> score of the tokens that temperature, min-p, top-k and top-p leave."""
    params = row.params
    largest = max(adjusted)
    scores = {i: (logit - largest) / params.temperature for i, logit in enumerate(adjusted)}
    if params.min_p > 0:
        scores = {i: score for i, score in scores.items() if score >= math.log(params.min_p)}
    likeliest = sorted(scores, key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        likeliest = likeliest[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(scores[i]) for i in likeliest)
        before, kept = 0.0, []
        for i in likeliest:
            if before >= params.top_p * total:
                break
            kept.append(i)
            before += math.exp(scores[i])
        likeliest = kept
    return {i: scores[i] for i in likeliest}


def plain_distribution(logits: Sequence[float], row: SampleRow) -> dict[int, float]:
    """token id -> the probability with which a random seed gives it."""
    scores = plain_filtered(plain_adjusted(logits, row), row)
    total = math.fsum(math.exp(score) for score in scores.values())
    return {i: math.exp(score) / total for i, score in scores.items()}


def plain_logprobs(token_id: int, logits: Sequence[float], num_top: int) -> OutputToken:
    largest = max(logits)
    log_total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    logprobs = [logit - log_total for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logprobs[i], i))[:num_top]
    return OutputToken(token_id, logprobs[token_id], tuple((i, logprobs[i]) for i in order))


def _noise(row: SampleRow, token_id: int) -> float:
    return float(gumbel_noise(row.params.seed, row.output_position, np.array([token_id]))[0])
