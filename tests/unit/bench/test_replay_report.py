"""Figures by hand, /metrics before and after, refusals, and the page."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.replay.page import make_page
from bench.replay.record import Outcome, RequestRecord
from bench.replay.refusals import State, refusals
from bench.replay.report import Objectives, Price, make_report, percentile
from bench.replay.server_metrics import ServerChange, change


def completed(queued: float, times: list[float], *, sent: float = 0.0, **fields: int) -> RequestRecord:
    record = RequestRecord(fields.pop("num_input_tokens", 100), queued, max(queued, sent))
    record.event_times_s, record.ended_s, record.outcome = times, times[-1], Outcome.COMPLETED
    record.num_reported_tokens = fields.pop("num_reported_tokens", len(times))
    record.num_cached_tokens = fields.pop("num_cached_tokens", None)
    return record


def failed(outcome: Outcome, error: str | None, ended: float = 1.0) -> RequestRecord:
    return RequestRecord(100, 0.0, 0.0, outcome=outcome, error=error, ended_s=ended)


FAST = completed(0.0, [0.1, 0.2, 0.4], num_cached_tokens=64)
FAST.kv_bytes, FAST.exposed_transfer_s = 1000, 0.25
SLOW = completed(1.0, [2.5, 3.0], sent=1.25, num_input_tokens=600, num_reported_tokens=6)
CANCELLED = RequestRecord(100, 2.0, 2.0, event_times_s=[3.0, 4.0], ended_s=4.0, outcome=Outcome.CANCELLED)
FAILED = failed(Outcome.FAILED, "status_503")


def test_percentiles_by_hand() -> None:
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 50, 95, 100)] == [1, 2.5, pytest.approx(3.85), 4]
    assert percentile([7], 99) == 7


def test_figures_by_hand() -> None:
    report = make_report([FAST, SLOW, CANCELLED, FAILED], Objectives(ttft_s=0.5, tpot_s=1.0), Price(per_hour=3.6))
    overall, buckets = report["overall"], report["buckets"]
    assert isinstance(overall, dict)
    assert isinstance(buckets, dict)
    assert report["duration_s"] == 4.0
    assert list(buckets) == ["0-512", "513-2048"]
    assert [overall[f"num_{outcome.value}"] for outcome in Outcome] == [2, 1, 0, 1]
    assert overall["num_output_tokens"] == 3 + 6 + 2
    assert overall["output_tokens_per_s"] == 11 / 4
    assert overall["requests_per_s"] == 2 / 4
    assert overall["goodput_requests_per_s"] == 1 / 4  # SLOW's TTFT is 1.5 s
    assert overall["objectives_met_share"] == 1 / 3  # the cancelled one asked for nothing more
    assert (overall["num_cached_tokens"], overall["kv_bytes"]) == (64, 1000)
    assert overall["exposed_transfer_ms"]["max"] == 250
    assert overall["errors"] == {"status_503": 1}
    # 3.6 an hour is 0.001 a second: 0.004 for 11 tokens.
    assert overall["cost_per_million_output_tokens"] == pytest.approx(0.004 / 11 * 1e6)
    assert overall["ttft_ms"]["max"] == pytest.approx(1500)
    assert overall["queue_ms"]["max"] == pytest.approx(250)
    assert overall["tpot_ms"]["p50"] == pytest.approx((150 + 100) / 2)  # SLOW: 0.5 s over five more tokens
    assert overall["inter_token_ms"]["count"] == 3
    assert buckets["513-2048"]["num_cached_tokens"] is buckets["513-2048"]["kv_bytes"] is None
    assert buckets["513-2048"]["output_tokens_per_s"] + buckets["0-512"]["output_tokens_per_s"] == 11 / 4


def test_what_is_not_stated_is_not_reported() -> None:
    overall = make_report([FAILED], Objectives(), Price())["overall"]
    assert isinstance(overall, dict)
    for name in ("goodput_requests_per_s", "objectives_met_share", "cost_per_million_output_tokens", "ttft_ms"):
        assert overall[name] is None


def test_the_price_of_power() -> None:
    assert Price(per_hour=1.0, watts=500, per_kwh=0.4).total_per_hour == pytest.approx(1.2)


def exposition(kv_bytes: int, cached: int, *, worker: str = "prefill-0", start: str = "ab") -> str:
    return f"""# TYPE twostroke_worker info
twostroke_worker_info{{worker="{worker}",role="prefill",backend="cpu, AVX-512",incarnation="{start}",address="x:1"}} 1.0
# TYPE twostroke_worker_ready gauge
twostroke_worker_ready{{worker="{worker}",role="prefill"}} 1.0
twostroke_worker_ready{{worker="decode-0",role="decode"}} 1.0
# TYPE twostroke_gateway_peak_memory_bytes gauge
twostroke_gateway_peak_memory_bytes 70.0
# TYPE twostroke_worker_peak_memory_bytes gauge
twostroke_worker_peak_memory_bytes{{worker="{worker}",role="prefill"}} 500.0
twostroke_worker_peak_memory_bytes{{worker="decode-0",role="decode"}} 0.0
# TYPE twostroke_worker_kv_bytes_moved counter
twostroke_worker_kv_bytes_moved_total{{worker="{worker}",role="prefill"}} {kv_bytes}
twostroke_worker_kv_bytes_moved_total{{worker="decode-0",role="decode"}} {kv_bytes}
# TYPE twostroke_worker_cached_prompt_tokens counter
twostroke_worker_cached_prompt_tokens_total{{worker="{worker}",role="prefill"}} {cached}
# TYPE twostroke_cached_tokens counter
twostroke_cached_tokens_total {cached}
# TYPE twostroke_fallbacks counter
twostroke_fallbacks_total{{reason="a"}} {cached}
twostroke_fallbacks_total{{reason="b"}} {cached}
"""


def test_the_server_s_totals_are_compared() -> None:
    assert change(exposition(10, 1), exposition(30, 4)) == ServerChange(
        num_prefill_workers=1,
        num_decode_workers=1,
        kv_bytes_moved=20,
        cached_prompt_tokens=3,
        cached_tokens=3,
        num_fallbacks=6,
        backends=("cpu, AVX-512",),
        peak_memory_bytes={"gateway": 70, "prefill-0": 500},
        restarted=(),
    )
    assert change("# TYPE x gauge\nx 1.0\n", exposition(30, 4)) is None


def test_restarted_and_replaced_workers_are_named() -> None:
    fallen = change(exposition(10, 1), exposition(5, 1))
    replaced = change(exposition(10, 1), exposition(30, 1, worker="prefill-1"))
    assert fallen is not None
    assert replaced is not None
    anew = change(exposition(10, 1), exposition(30, 1, start="cd"))
    assert anew is not None
    assert anew.restarted == ("prefill-0",)
    assert fallen.restarted == ("decode-0", "prefill-0")
    assert replaced.restarted == ("prefill-0", "prefill-1")


def refused(
    records: list[RequestRecord],
    warm_up: list[RequestRecord],
    state: State = State.WARM,
    server: ServerChange | None = None,
    *,
    allows_errors: bool = False,
) -> str:
    return "; ".join(refusals(records, warm_up, state, server, allows_errors=allows_errors))


def test_what_happened_may_be_reported() -> None:
    moved = change(exposition(10, 1), exposition(30, 4))
    assert moved is not None
    monolith = replace(moved, num_prefill_workers=0, kv_bytes_moved=0)
    assert refused([FAST, CANCELLED], [FAST]) == ""
    assert refused([FAST], [FAST], server=moved) == ""
    assert refused([FAST], [], State.COLD, monolith) == ""
    assert refused([FAST, FAILED], [FAST], allows_errors=True) == ""


def test_what_did_not_happen_is_named() -> None:
    unmoved = change(exposition(30, 1), exposition(30, 4))
    assert "no KV moved although 1 prefill workers exist" in refused([FAST], [FAST], server=unmoved)
    assert "restarted" in refused([FAST], [FAST], server=change(exposition(10, 1), exposition(5, 1)))
    assert "1 of 2 requests failed (status_503)" in refused([FAST, FAILED], [FAST])
    assert "timed_out" in refused([FAST, failed(Outcome.TIMED_OUT, "timed_out")], [FAST])
    assert "had no warm-up" in refused([FAST], [])
    assert "1 of 2 warm-up requests failed" in refused([FAST], [FAST, FAILED], allows_errors=True)
    assert "called cold" in refused([FAST], [FAST], State.COLD)
    assert refused([FAILED], [FAST], allows_errors=True) == "no request completed"


def test_the_page_stands_alone_and_escapes() -> None:
    report = make_report([FAST, SLOW, FAILED], Objectives(), Price())
    result = {
        "model": "<script>alert(1)</script>",
        "promise": {"exact": True},
        "state": "warm",
        "trace": {"digest": "ab"},
        "report": report,
        "server": None,
        "configuration": {"notes": 'a "quoted" & <b>'},
        "hardware": {},
        "versions": {},
    }
    page = make_page(result, {"ttft_ms": {"0-512": [100.0], "513-2048": [1500.0]}, "tpot_ms": {"0-512": []}})
    assert page.count("<svg") == 1
    assert ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6]).tag == "svg"
    assert page.count("<polyline") == 2
    assert "<script" not in page
    assert "http" not in page
    assert "a &quot;quoted&quot; &amp; &lt;b&gt;" in page
