"""The figures and the table of both parts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

Json = dict[str, float]

MIN_SPEED_RATIO = 0.8
MAX_EXPOSED_SHARE = 0.02
MAX_SECOND_TOKEN_RATIO = 1.5


@dataclass(slots=True)
class PushTimes:
    """Seconds of each round, of one length of prompt; the two of a round came one right after the other."""

    num_tokens: int
    num_bytes: int
    raw_s: list[float] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Waits:
    """Seconds of each request, of one length of prompt."""

    num_tokens: int
    ttft_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)  # by the gateway's word
    second_token_s: list[float] = field(default_factory=list)  # from the first token to the second, at the client
    tpot_s: list[float] = field(default_factory=list)  # median between the later tokens


def push_figures(times: PushTimes) -> Json:
    """Speeds in GB/s; a ratio is push over raw. The median ratio is of the rounds' own."""
    ratios = [raw_s / push_s for raw_s, push_s in zip(times.raw_s, times.push_s, strict=True)]
    return {
        "num_tokens": times.num_tokens,
        "num_bytes": times.num_bytes,
        "num_rounds": len(ratios),
        "raw_best_gb_per_s": times.num_bytes / min(times.raw_s) / 1e9,
        "push_best_gb_per_s": times.num_bytes / min(times.push_s) / 1e9,
        "raw_median_gb_per_s": times.num_bytes / median(times.raw_s) / 1e9,
        "push_median_gb_per_s": times.num_bytes / median(times.push_s) / 1e9,
        "ratio_of_best": min(times.raw_s) / min(times.push_s),
        "median_ratio": median(ratios),
    }


def wait_figures(waits: Waits) -> Json:
    """Medians over the requests; shares and ratios are of each request first."""
    pairs = zip(waits.exposed_s, waits.ttft_s, strict=True)
    delays = zip(waits.second_token_s, waits.tpot_s, strict=True)
    return {
        "num_tokens": waits.num_tokens,
        "num_requests": len(waits.ttft_s),
        "ttft_ms": 1000 * median(waits.ttft_s),
        "exposed_transfer_ms": 1000 * median(waits.exposed_s),
        "exposed_share": median(exposed / ttft for exposed, ttft in pairs),
        "second_token_ms": 1000 * median(waits.second_token_s),
        "tpot_ms": 1000 * median(waits.tpot_s),
        "second_token_ratio": median(second / tpot for second, tpot in delays),
    }


def table(pushes: Sequence[Json], waits: Sequence[Json]) -> str:
    lines = []
    if pushes:
        lines += [
            f"| pushed | raw gRPC, GB/s | push, GB/s | best / best (goal ≥ {MIN_SPEED_RATIO}) | median ratio |",
            "|---|---|---|---|---|",
            *(_push_line(each) for each in pushes),
            "",
        ]
    if waits:
        lines += [
            f"| prompt | TTFT, ms | exposed, ms | share (goal ≤ {MAX_EXPOSED_SHARE:.0%}) | second token, ms | TPOT, ms "
            f"| ratio (goal ≤ {MAX_SECOND_TOKEN_RATIO}) |",
            "|---|---|---|---|---|---|---|",
            *(_wait_line(each) for each in waits),
        ]
    return "\n".join(lines)


def _push_line(row: Json) -> str:
    return (
        "| {num_tokens:,} tokens, {num_bytes:,} bytes | {raw_best_gb_per_s:.2f} | {push_best_gb_per_s:.2f} "
        "| {ratio_of_best:.2f} | {median_ratio:.2f} |".format(**row)
    )


def _wait_line(row: Json) -> str:
    return (
        "| {num_tokens:,} tokens | {ttft_ms:,.0f} | {exposed_transfer_ms:.1f} | {exposed_share:.2%} "
        "| {second_token_ms:.1f} | {tpot_ms:.1f} | {second_token_ratio:.2f} |".format(**row)
    )
