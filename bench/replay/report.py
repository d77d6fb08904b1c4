"""Figures of a run, overall and per bucket of prompt length. Pure: records in, JSON-able values out.

Every figure is of requests that completed, but for output tokens a second, which count what cancelled requests got too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.replay.record import Outcome, RequestRecord
from bench.replay.trace import bucket_of

Json = dict[str, object]
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count towards goodput. With neither stated there is no goodput."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def are_stated(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def are_met(self, record: RequestRecord) -> bool:
        """A request of one token has no TPOT and keeps any. One without text has no TTFT and keeps none."""
        if record.outcome is not Outcome.COMPLETED:
            return False
        keeps_ttft = self.ttft_s is None or (record.ttft_s is not None and record.ttft_s <= self.ttft_s)
        return keeps_ttft and (self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Price:
    """What the user says that the serving machines cost."""

    per_hour: float = 0.0
    watts: float = 0.0
    per_kwh: float = 0.0

    @property
    def total_per_hour(self) -> float:
        return self.per_hour + self.watts / 1000 * self.per_kwh


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. Needs at least one value; 0 <= percent <= 100."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def duration_s(records: Sequence[RequestRecord]) -> float:
    """From the first request that was due to the last that ended."""
    return max(record.ended_s for record in records) - min(record.queued_s for record in records)


def make_report(records: Sequence[RequestRecord], objectives: Objectives, price: Price) -> Json:
    """`overall` and `buckets`. Rates of a bucket are over the whole run's duration, so that they add up."""
    seconds = duration_s(records)
    buckets: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.num_input_tokens):
        buckets.setdefault(bucket_of(record.num_input_tokens), []).append(record)
    overall = _figures(records, seconds, objectives)
    overall["cost_per_million_output_tokens"] = _cost(records, seconds, price)
    return {
        "duration_s": seconds,
        "overall": overall,
        "buckets": {name: _figures(held, seconds, objectives) for name, held in buckets.items()},
    }


def distributions(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Milliseconds of what is reported by percentiles, and drawn."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    return {
        "queue_ms": [record.queue_s * 1000 for record in completed],
        "ttft_ms": [record.ttft_s * 1000 for record in completed if record.ttft_s is not None],
        "tpot_ms": [record.tpot_s * 1000 for record in completed if record.tpot_s is not None],
        "inter_token_ms": [gap * 1000 for record in completed for gap in record.gaps_s],
        "exposed_transfer_ms": [
            record.exposed_transfer_s * 1000 for record in completed if record.exposed_transfer_s is not None
        ],
    }


def _figures(records: Sequence[RequestRecord], seconds: float, objectives: Objectives) -> Json:
    outcomes = {outcome: sum(record.outcome is outcome for record in records) for outcome in Outcome}
    num_met = sum(objectives.are_met(record) for record in records)
    num_asked = len(records) - outcomes[Outcome.CANCELLED]
    figures: Json = {
        "num_requests": len(records),
        **{f"num_{outcome.value}": count for outcome, count in outcomes.items()},
        "num_input_tokens": sum(record.num_input_tokens for record in records),
        "num_output_tokens": _num_delivered(records),
        "num_cached_tokens": _told([record.num_cached_tokens for record in records]),
        "kv_bytes": _told([record.kv_bytes for record in records]),
        "output_tokens_per_s": _num_delivered(records) / seconds,
        "requests_per_s": outcomes[Outcome.COMPLETED] / seconds,
        "goodput_requests_per_s": num_met / seconds if objectives.are_stated else None,
        "objectives_met_share": num_met / num_asked if objectives.are_stated and num_asked else None,
        "errors": _errors(records),
    }
    for name, values in distributions(records).items():
        figures[name] = _summary(values)
    return figures


def _summary(values: Sequence[float]) -> Mapping[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"count": len(values), "mean": math.fsum(values) / len(values), **percentiles, "max": max(values)}


def _num_delivered(records: Sequence[RequestRecord]) -> int:
    counted = (Outcome.COMPLETED, Outcome.CANCELLED)
    return sum(record.num_output_tokens for record in records if record.outcome in counted)


def _told(values: Sequence[int | None]) -> int | None:
    """The sum of what the server said; None where it never did."""
    told = [value for value in values if value is not None]
    return sum(told) if told else None


def _errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    names = [record.error for record in records if record.error is not None]
    return {name: names.count(name) for name in sorted(set(names))}


def _cost(records: Sequence[RequestRecord], seconds: float, price: Price) -> float | None:
    """The run's price over its output tokens, in millions, in the user's currency; None where no price is stated."""
    num_tokens = _num_delivered(records)
    if price.total_per_hour == 0 or num_tokens == 0:
        return None
    return price.total_per_hour * seconds / 3600 / (num_tokens / 1e6)
