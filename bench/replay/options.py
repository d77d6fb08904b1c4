"""The command line of a replay, as settings."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench.replay.prompts import PromptMaker
from bench.replay.refusals import State
from bench.replay.report import Objectives, Price
from bench.replay.trace import Arrivals, Trace, TraceSettings, make_trace
from bench.replay.trace_files import read_csv, read_mooncake
from common.errors import ConfigError

DEFAULT_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Options:
    url: str
    api_key: str | None
    out: Path
    html: Path | None
    model: str | None  # None: the first that the server lists
    trace: Trace
    trace_settings: TraceSettings | None  # None: a recorded trace
    prompts: PromptMaker
    state: State
    num_warm_up: int
    timeout_s: float
    settle_s: float
    ignores_eos: bool
    allows_errors: bool
    objectives: Objectives
    price: Price
    notes: str

    def configuration(self) -> dict[str, object]:
        """For the report; it names neither the server's address nor a file."""
        return {
            "trace": asdict(self.trace_settings) if self.trace_settings is not None else "recorded",
            "num_warm_up": self.num_warm_up,
            "timeout_s": self.timeout_s,
            "ignore_eos": self.ignores_eos,
            "allow_errors": self.allows_errors,
            "prompts": "text" if self.prompts.as_text else "token ids",
            "objective_ttft_s": self.objectives.ttft_s,
            "objective_tpot_s": self.objectives.tpot_s,
            "price_per_hour": self.price.per_hour,
            "watts": self.price.watts,
            "price_per_kwh": self.price.per_kwh,
            "notes": self.notes,
        }


def parse(argv: Sequence[str] | None) -> Options:
    """Raises ConfigError for a setting or a trace that is wrong; argparse ends the process for a malformed line."""
    given = _parser().parse_args(argv)
    state = State(given.state)
    trace_settings = _trace_settings(given)
    if not 0 <= given.first_token_id <= given.last_token_id:
        raise ConfigError(f"--first-token-id is {given.first_token_id}; it must be from 0 to --last-token-id")
    return Options(
        url=given.url.rstrip("/").removesuffix("/v1"),
        api_key=given.api_key_file.read_text().strip() if given.api_key_file else None,
        out=given.out,
        html=given.html,
        model=given.model,
        trace=make_trace(trace_settings) if trace_settings is not None else _recorded(given),
        trace_settings=trace_settings,
        prompts=PromptMaker(given.seed, given.first_token_id, given.last_token_id, given.prompts == "text"),
        state=state,
        num_warm_up=_num_warm_up(given.warm_up, state),
        timeout_s=given.timeout_s,
        settle_s=given.settle_s,
        ignores_eos=given.ignore_eos,
        allows_errors=given.allow_errors,
        objectives=Objectives(_seconds(given.objective_ttft_ms), _seconds(given.objective_tpot_ms)),
        price=Price(given.price_per_hour, given.watts, given.price_per_kwh),
        notes=given.notes,
    )


def _num_warm_up(given: int | None, state: State) -> int:
    if given is None:
        return DEFAULT_WARM_UP if state is State.WARM else 0
    if given < 0:
        raise ConfigError(f"--warm-up is {given}; it must be at least 0")
    return given


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _trace_settings(given: argparse.Namespace) -> TraceSettings | None:
    if given.mooncake is not None or given.csv is not None:
        return None
    values = {field.name: getattr(given, field.name) for field in fields(TraceSettings)}
    arrivals, weights = Arrivals(given.arrivals), tuple(given.bucket_weights)
    return TraceSettings(**values | {"arrivals": arrivals, "bucket_weights": weights})


def _recorded(given: argparse.Namespace) -> Trace:
    if given.mooncake is not None:
        return read_mooncake(given.mooncake.read_text().splitlines(), seed=given.seed)
    return read_csv(given.csv.read_text().splitlines(), seed=given.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.replay", description="Replay traffic against an OpenAI-compatible server."
    )
    parser.add_argument("--url", required=True, help="the server's root, like http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True, help="the JSON result")
    parser.add_argument("--html", type=Path, help="a page of the result, self-contained")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key-file", type=Path, help="a file with the API key alone")
    parser.add_argument("--notes", default="", help="recorded as given: how the server was started, on what")
    _add_trace(parser)
    _add_run(parser)
    return parser


def _add_trace(parser: argparse.ArgumentParser) -> None:
    default = TraceSettings()
    group = parser.add_argument_group("trace")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--mooncake", type=Path, help="a trace in Mooncake's JSONL")
    source.add_argument("--csv", type=Path, help="a trace of timestamp,input,output")
    group.add_argument("--seed", type=int, default=default.seed)
    group.add_argument("--num-requests", type=int, default=default.num_requests)
    group.add_argument("--arrivals", choices=["poisson", "burst", "closed"], default=default.arrivals.value)
    group.add_argument("--rate-per-s", type=float, default=default.rate_per_s, help="mean, of poisson and burst")
    group.add_argument("--burst-size", type=int, default=default.burst_size)
    group.add_argument("--num-clients", type=int, default=default.num_clients, help="of closed")
    weights_help = "of prompts of 0-512, 513-2048, 2049-8192 tokens"
    group.add_argument("--bucket-weights", type=float, nargs=3, default=default.bucket_weights, help=weights_help)
    group.add_argument("--min-input", type=int, default=default.min_input)
    group.add_argument("--max-input", type=int, default=default.max_input)
    group.add_argument("--min-output", type=int, default=default.min_output)
    group.add_argument("--max-output", type=int, default=default.max_output)
    share_help = "of each prompt's tokens: 0, 0.5, 0.9"
    group.add_argument("--shared-prefix-share", type=float, default=default.shared_prefix_share, help=share_help)
    group.add_argument("--num-prefixes", type=int, default=default.num_prefixes)
    group.add_argument("--cancel-share", type=float, default=default.cancel_share, help="of requests, cancelled midway")


def _add_run(parser: argparse.ArgumentParser) -> None:
    prompts, group = PromptMaker(0), parser.add_argument_group("run")
    group.add_argument("--prompts", choices=["token-ids", "text"], default="token-ids")
    group.add_argument("--first-token-id", type=int, default=prompts.first_token_id)
    group.add_argument("--last-token-id", type=int, default=prompts.last_token_id)
    group.add_argument("--state", choices=[*State], default=State.WARM.value, help="what the run is called")
    group.add_argument("--warm-up", type=int, help=f"requests before a warm run; default {DEFAULT_WARM_UP}")
    group.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    group.add_argument("--settle-s", type=float, default=1.0, help="before /metrics are read, so that they are current")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="ask for full lengths")
    group.add_argument("--allow-errors", action="store_true", help="report a run in which requests failed")
    group.add_argument("--objective-ttft-ms", type=float, help="for goodput")
    group.add_argument("--objective-tpot-ms", type=float, help="for goodput")
    group.add_argument("--price-per-hour", type=float, default=0.0, help="of the serving machines, for the cost")
    group.add_argument("--watts", type=float, default=0.0, help="drawn by the serving machines, for the cost")
    group.add_argument("--price-per-kwh", type=float, default=0.0)
