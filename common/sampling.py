"""What a request asks of sampling. Pure data; `common.model.sampler` carries it out on tensors.

The order of the filters is fixed: penalties, bias, temperature, min-p, top-k, top-p; then Gumbel noise keyed by
(seed, output position, token id), arg max, ties to the lowest id.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import BadRequest

MAX_LOGPROBS = 20


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked when made: a value outside its range raises BadRequest naming the field and the value."""

    seed: int = 0  # 0 <= seed < 2**64
    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens only
    frequency_penalty: float = 0.0  # over generated tokens only
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()  # empty: ignore_eos
    num_logprobs: int | None = None  # None: none; 0: of the chosen token alone
    speculation: bool = True

    def __post_init__(self) -> None:
        _check("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        _check("max_tokens", self.max_tokens, 1 <= self.max_tokens < 2**31, "at least 1")
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "0 to 2")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and up to 1")
        _check("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 (off) or more")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1")
        _check("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "-2 to 2")
        _check("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2")
        _check("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 10.0, "above 0, to 10")
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", bias, token_id >= 0 and -100.0 <= bias <= 100.0, "token ids with -100 to 100")
        if self.num_logprobs is not None:
            _check("logprobs", self.num_logprobs, 0 <= self.num_logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One sampled token. Log probabilities are of the model's raw distribution, before any filter."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log probability), most likely first


def _check(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds or not math.isfinite(value):
        raise BadRequest(f"{name} is {value}; allowed: {allowed}", param=name)
