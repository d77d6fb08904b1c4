"""Whether two sides differ by more than runs of one side do. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, variance

MIN_DIFFERENCE = 0.02
"""Share below which no difference counts, however steady the runs were."""

# Student's t, 97.5 %, for 1, 2, 3 ... degrees of freedom; the last one serves for more, and is a little too wide there.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"


class Change(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # within the noise


@dataclass(frozen=True, slots=True)
class Difference:
    """Means of both sides. `noise` is what the difference must exceed, in the figure's unit."""

    before: float
    after: float
    noise: float
    change: Change

    @property
    def ratio(self) -> float | None:
        """After over before; None where before is 0."""
        return self.after / self.before if self.before else None

    @property
    def noise_share(self) -> float | None:
        return self.noise / abs(self.before) if self.before else None


def compare(before: Sequence[float], after: Sequence[float], better: Better, assumed_share: float) -> Difference:
    """Each side has one value per run, at least one. `assumed_share` is the noise where both sides have one alone."""
    start, end = fmean(before), fmean(after)
    noise = noise_of(before, after, assumed_share)
    return Difference(start, end, noise, _change(end - start, noise, better))


def noise_of(before: Sequence[float], after: Sequence[float], assumed_share: float) -> float:
    """Half the 95 % confidence interval of the difference of the means, with one variance for both sides."""
    size = max(abs(fmean(before)), abs(fmean(after)))
    freedom = len(before) + len(after) - 2
    if freedom == 0:
        return size * max(MIN_DIFFERENCE, assumed_share)
    squares = sum((len(side) - 1) * variance(side) for side in (before, after) if len(side) > 1)
    error = math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after)))
    return max(size * MIN_DIFFERENCE, _T[min(freedom, len(_T)) - 1] * error)


def _change(difference: float, noise: float, better: Better) -> Change:
    if abs(difference) <= noise:
        return Change.SAME
    return Change.BETTER if (difference < 0) is (better is Better.LOWER) else Change.WORSE
