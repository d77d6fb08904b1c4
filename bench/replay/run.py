"""One run: warm-up, replay, the server's totals before and after, then a result or a refusal."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench.replay.client import ClientSettings, ReplayClient
from bench.replay.options import Options
from bench.replay.page import make_page
from bench.replay.record import RequestRecord
from bench.replay.refusals import refusals
from bench.replay.report import Json, distributions, make_report
from bench.replay.server_metrics import ServerChange, change
from bench.replay.surroundings import hardware, model_label, versions
from bench.replay.trace import bucket_of, shared_token_share
from common.errors import ConfigError

FORMAT = 2


class Refused(Exception):
    """The run must not be reported. `reasons` say what did not happen."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


@dataclass(frozen=True, slots=True)
class Observed:
    model: str
    promise: Mapping[str, object]
    warm_up: list[RequestRecord]
    records: list[RequestRecord]
    server: ServerChange | None


def run(options: Options) -> tuple[Json, str]:
    """The result and its page. Raises Refused; httpx.HTTPError where the server cannot be reached at all."""
    observed = asyncio.run(observe(options))
    reasons = refusals(
        observed.records, observed.warm_up, options.state, observed.server, allows_errors=options.allows_errors
    )
    if reasons:
        raise Refused(reasons)
    result = make_result(options, observed)
    return result, make_page(result, _curves(observed.records))


async def observe(options: Options) -> Observed:
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=options.timeout_s, limits=limits
    ) as http:
        model, promise = await _model(http, options.model)
        settings = ClientSettings(model, options.timeout_s, options.ignores_eos)
        client = ReplayClient(http, settings, options.prompts)
        warm_up = await client.warm_up(options.trace, options.num_warm_up)
        before = await _metrics(http, options.settle_s)
        records = await client.replay(options.trace)
        after = await _metrics(http, options.settle_s)
    server = change(before, after) if before is not None and after is not None else None
    return Observed(model_label(model), promise, warm_up, records, server)


def make_result(options: Options, observed: Observed) -> Json:
    trace = options.trace
    return {
        "format": FORMAT,
        "model": observed.model,
        "promise": dict(observed.promise),
        "state": options.state.value,
        "trace": {
            "digest": trace.digest(),
            "seed": trace.seed,
            "arrivals": trace.arrivals.value,
            "num_clients": trace.num_clients,
            "num_requests": len(trace.requests),
            "shared_token_share": shared_token_share(trace.requests),
        },
        "configuration": options.configuration(),
        "hardware": hardware(),
        "versions": versions(),
        "server": asdict(observed.server) if observed.server is not None else None,
        "report": make_report(observed.records, options.objectives, options.price),
        "requests": [_row(record) for record in observed.records],
    }


def _row(record: RequestRecord) -> Json:
    return {
        "queued_s": record.queued_s,
        "sent_s": record.sent_s,
        "first_byte_s": record.first_byte_s,
        "ended_s": record.ended_s,
        "num_input_tokens": record.num_input_tokens,
        "num_output_tokens": record.num_output_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "kv_bytes": record.kv_bytes,
        "exposed_transfer_s": record.exposed_transfer_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "status": record.status,
        "outcome": record.outcome.value,
        "error": record.error,
        "request_digest": record.request_digest,
        "answer_digest": record.answer_digest,
    }


def _curves(records: Sequence[RequestRecord]) -> dict[str, dict[str, list[float]]]:
    buckets: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.num_input_tokens):
        buckets.setdefault(bucket_of(record.num_input_tokens), []).append(record)
    curves: dict[str, dict[str, list[float]]] = {}
    for bucket, held in buckets.items():
        for figure, values in distributions(held).items():
            curves.setdefault(figure, {})[bucket] = values
    return curves


async def _model(http: httpx.AsyncClient, wanted: str | None) -> tuple[str, dict[str, object]]:
    """Its name, and what a Twostroke gateway says of its answers: the numeric path, and whether it is exact."""
    response = await http.get("/v1/models")
    if wanted is None:
        response.raise_for_status()
    listed: dict[str, Any] = response.json() if response.is_success else {}
    models = [model for model in listed.get("data") or [] if wanted in (None, model["id"])]
    if not models and wanted is None:
        raise ConfigError("the server lists no model at /v1/models; wait until it is ready, or give --model")
    card: dict[str, Any] = models[0] if models else {"id": wanted}
    return str(card["id"]), {name: card.get(name) for name in ("numerics", "exact", "inexact_reason")}


async def _metrics(http: httpx.AsyncClient, settle_s: float) -> str | None:
    """None where the server has no /metrics. Workers report their totals with a delay: `settle_s` lets it pass."""
    await asyncio.sleep(settle_s)
    response = await http.get("/metrics")
    return response.text if response.status_code == httpx.codes.OK else None
