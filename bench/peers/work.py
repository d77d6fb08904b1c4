"""The works that every engine does, and the figures that are compared. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Work:
    """`concurrency` requests at once until `num_requests` are done; prompts are random and share nothing."""

    name: str
    concurrency: int
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int

    def job(self, seed: int) -> dict[str, int]:
        """What a driver reads: see `drivers`."""
        return {
            "concurrency": self.concurrency,
            "num_requests": self.num_requests,
            "num_input_tokens": self.num_input_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seed": seed,
        }


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one work on one engine in one round; medians over its requests."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float


class Better(Enum):
    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the table. `must` and `aim` are what Twostroke's ratio to the best peer should come to."""

    label: str
    works: tuple[str, ...]
    figure: Callable[[Mapping[str, Figures]], float]  # of the figures by work; each of `works` is there
    unit: str
    better: Better
    must: float
    aim: float


ONE, SIXTEEN, THIRTY_TWO = "c1-128-64", "c16-256-64", "c32-64-128"
LONG_PROMPT, LONG_CONTEXT = "c1-4096-128", "c16-960-128"

WORKS = (
    Work(ONE, concurrency=1, num_requests=4, num_input_tokens=128, num_output_tokens=64),
    Work(SIXTEEN, concurrency=16, num_requests=16, num_input_tokens=256, num_output_tokens=64),
    Work(THIRTY_TWO, concurrency=32, num_requests=32, num_input_tokens=64, num_output_tokens=128),
    Work(LONG_PROMPT, concurrency=1, num_requests=1, num_input_tokens=4096, num_output_tokens=128),
    # A context of 1,024 tokens on average; long enough that prefilling the other prompts weighs little.
    Work(LONG_CONTEXT, concurrency=16, num_requests=16, num_input_tokens=960, num_output_tokens=128),
)
WARM_UP = Work("warm-up", concurrency=4, num_requests=8, num_input_tokens=256, num_output_tokens=16)

ROWS = (
    Row("1 at once, 128 in / 64 out: TPOT", (ONE,), lambda by: by[ONE].tpot_ms, "ms", Better.LOWER, 1.0, 0.7),
    Row("1 at once, 128 in / 64 out: TTFT", (ONE,), lambda by: by[ONE].ttft_ms, "ms", Better.LOWER, 1.2, 0.8),
    Row(
        "16 at once, 256 in / 64 out: output",
        (SIXTEEN,),
        lambda by: by[SIXTEEN].output_tokens_per_s,
        "tok/s",
        Better.HIGHER,
        1.2,
        1.8,
    ),
    Row(
        "32 at once, 64 in / 128 out: output",
        (THIRTY_TWO,),
        lambda by: by[THIRTY_TWO].output_tokens_per_s,
        "tok/s",
        Better.HIGHER,
        1.2,
        1.8,
    ),
    Row("one prompt of 4,096: TTFT", (LONG_PROMPT,), lambda by: by[LONG_PROMPT].ttft_ms, "ms", Better.LOWER, 0.9, 0.6),
    Row(
        "16 at once, 960 in / 128 out: TPOT",
        (LONG_CONTEXT,),
        lambda by: by[LONG_CONTEXT].tpot_ms,
        "ms",
        Better.LOWER,
        1.0,
        0.6,
    ),
)


@dataclass(frozen=True, slots=True)
class Growth:
    """TPOT of one sequence at 4,096 tokens of context over that at 128; its goals are of the engine itself."""

    label: str = "growth of TPOT, 4,096 over 128 tokens of context"
    works: tuple[str, ...] = (ONE, LONG_PROMPT)
    must: float = 1.6
    aim: float = 1.3

    def of(self, by_work: Mapping[str, Figures]) -> float:
        return by_work[LONG_PROMPT].tpot_ms / by_work[ONE].tpot_ms


GROWTH = Growth()
