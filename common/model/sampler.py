"""Chooses tokens from logits. A row's choice is a function of that row alone: its logits, its parameters and history.

All arithmetic on a row is fp64. V is the vocabulary size, l the row's logits. In this order:

1. Penalties. Repetition (CTRL, arXiv 1909.05858): for each token id that occurs in the prompt or the output, l is
   divided by the penalty where l > 0, else multiplied by it. Then, for each token id that occurs c > 0 times in the
   output, l -= c * frequency_penalty + presence_penalty.
2. Bias: l += logit_bias.
3. Temperature T > 0: s = (l - max l) / T. From here on probabilities are softmax(s) over the tokens that are left.
4. min-p: drops tokens with s < ln(min_p), that is with p < min_p * (the largest p).
5. top-k: keeps the k largest; among equals the lowest ids.
6. top-p: tokens sorted by (-s, id); drops those before which at least top_p of the probability lies already.
7. Gumbel-max: the token with the largest s + gumbel_noise(seed, output position, token id); among equals the lowest id.

T = 0 takes the largest l after step 2, among equals the lowest id: no filter would drop it, so none is run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.model.gumbel import gumbel_noise
from common.sampling import OutputToken, SamplingParams

_LOGIT_LIMIT = 1e300  # where a repetition penalty near 0 would overflow


class SampleRow(NamedTuple):
    """How one row of logits becomes a token.

    `output_position` 0 is the request's first output token. `output_token_ids` are all output tokens before this
    position, draft tokens included. Precondition: every token id, those of the logit bias too, is below V.
    """

    params: SamplingParams
    output_position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the arg max of the model's logits and nothing else is wanted."""
        params = self.params
        return params.is_greedy and not params.needs_history and not params.logit_bias and params.num_logprobs is None


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that the filters have left."""

    token_ids: NDArray[np.int64]  # [N], ascending
    scores: NDArray[np.float64]  # [N], s of the module's docstring

    def at(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> "_Candidates":
        return _Candidates(self.token_ids[index], self.scores[index])


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[OutputToken]:
    """One token for each row of `logits` [R, V] fp32 on any device. Precondition: they are finite."""
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits, {len(rows)} rows to sample"
    tokens: dict[int, OutputToken] = {}
    greedy = [index for index, row in enumerate(rows) if row.is_plain_greedy]
    others = [index for index, row in enumerate(rows) if not row.is_plain_greedy]
    if greedy:
        picked = logits if not others else logits[greedy]
        tokens.update((i, OutputToken(token_id)) for i, token_id in zip(greedy, _first_arg_max(picked), strict=True))
    if others:
        picked = logits if not greedy else logits[others]
        on_host = picked.cpu().numpy()
        tokens.update((index, _sample_row(on_host[i], rows[index])) for i, index in enumerate(others))
    return [tokens[index] for index in range(len(rows))]


def _first_arg_max(logits: torch.Tensor) -> list[int]:
    """[R, V] -> the lowest index of each row's largest value, by construction on every device."""
    if logits.device.type == "cpu":
        return np.argmax(logits.numpy(), axis=1).tolist()  # NumPy promises the first
    is_max = logits == logits.amax(dim=1, keepdim=True)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(is_max, token_ids, logits.shape[1]).amin(dim=1).tolist()


def _sample_row(logits: NDArray[np.float32], row: SampleRow) -> OutputToken:
    adjusted = _adjust(logits.astype(np.float64), row)
    token_id = int(np.argmax(adjusted)) if row.params.is_greedy else _sample_token(adjusted, row)
    if row.params.num_logprobs is None:
        return OutputToken(token_id)
    return _with_logprobs(token_id, logits, row.params.num_logprobs)


def _adjust(logits: NDArray[np.float64], row: SampleRow) -> NDArray[np.float64]:
    """Steps 1 and 2. `logits` [V] is mutated and returned."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*row.prompt_token_ids, *row.output_token_ids], dtype=np.int64))
        of_seen = logits[seen]
        with np.errstate(over="ignore"):
            penalized = np.where(
                of_seen > 0.0, of_seen / params.repetition_penalty, of_seen * params.repetition_penalty
            )
        logits[seen] = np.clip(penalized, -_LOGIT_LIMIT, _LOGIT_LIMIT)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        seen, counts = np.unique(np.array(row.output_token_ids, dtype=np.int64), return_counts=True)
        logits[seen] -= counts * params.frequency_penalty + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    return logits


def _sample_token(logits: NDArray[np.float64], row: SampleRow) -> int:
    """Steps 3 to 7."""
    params = row.params
    with np.errstate(over="ignore"):  # a tiny temperature may send all but the largest to minus infinity
        scores = (logits - logits.max()) / params.temperature
    left = _Candidates(np.arange(scores.size), scores)
    if params.min_p > 0.0:
        left = left.at(left.scores >= math.log(params.min_p))
    if 0 < params.top_k < left.scores.size:
        left = left.at(_largest(left.scores, params.top_k))
    if params.top_p < 1.0:
        left = left.at(_nucleus(left.scores, params.top_p))
    noisy = left.scores + gumbel_noise(params.seed, row.output_position, left.token_ids)
    return int(left.token_ids[np.argmax(noisy)])


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, ascending; among equals the lowest indices. 0 < count <= size."""
    smallest_kept = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > smallest_kept)
    equal = np.flatnonzero(values == smallest_kept)
    return np.sort(np.concatenate((above, equal[: count - above.size])))


def _nucleus(scores: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the tokens that step 6 keeps."""
    reached = np.cumsum(np.exp(-np.sort(-scores)))  # the largest score is 0: no overflow
    num_kept = int(np.searchsorted(reached, top_p * reached[-1])) + 1  # up to the first that reaches it
    return _largest(scores, num_kept)


def _with_logprobs(token_id: int, logits: NDArray[np.float32], num_top: int) -> OutputToken:
    """Adds log probabilities of the model's own distribution: log_softmax of the untouched logits, in fp64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - math.log(np.exp(shifted).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        likeliest = _largest(logprobs, min(num_top, logprobs.size))
        ordered = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
        top = tuple((int(i), float(logprobs[i])) for i in ordered)
    return OutputToken(token_id, float(logprobs[token_id]), top)
