"""What the load asks: a fixed set of requests, drawn from a seed, each with one right answer."""

import random
from dataclasses import dataclass
from typing import Any

from tests.support.tiny_models import VOCAB_SIZE

NUM_SHARED_PREFIXES = 8
FIRST_PLAIN_ID = 3  # what comes before is begin, end and start of a message


@dataclass(frozen=True)
class Case:
    """A body of /v1/completions, without `model` and `stream`."""

    number: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What must be equal. `tokens` is empty where no log probabilities were asked for."""

    text: str
    finish_reason: str | None
    tokens: tuple[str, ...]

    def begins_with(self, part: "Answer") -> bool:
        """Whether `part` is an answer like this one that was cut off."""
        return self.text.startswith(part.text) and self.tokens[: len(part.tokens)] == part.tokens


def make_cases(seed: int, count: int) -> list[Case]:
    draw = random.Random(seed)
    prefixes = [_tokens(draw, draw.choice((33, 64, 100, 160))) for _ in range(NUM_SHARED_PREFIXES)]
    return [Case(number, _body(draw, number, prefixes)) for number in range(count)]


def _body(draw: random.Random, number: int, prefixes: list[list[int]]) -> dict[str, Any]:
    prefix = draw.choice(prefixes) if draw.random() < 0.5 else []
    body: dict[str, Any] = {
        "prompt": prefix + _tokens(draw, draw.choice((1, 7, 16, 40, 90, 150))),
        "max_tokens": draw.choice((1, 2, 5, 12, 24, 48)),
        "seed": number,
        "ignore_eos": draw.random() < 0.7,
        "temperature": 0.0,
    }
    if draw.random() < 0.6:
        body |= {
            "temperature": draw.choice((0.7, 1.0)),
            "top_p": draw.choice((0.9, 1.0)),
            "top_k": draw.choice((0, 40)),
        }
    if draw.random() < 0.2:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
    if draw.random() < 0.5:
        body["logprobs"] = 0
    return body


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(count)]
