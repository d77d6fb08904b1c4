"""Comparison cards: what is refused, what the gates say, and what is decided."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.replay import local
from bench.replay.card.comparable import changes, refusals
from bench.replay.card.make import Rules, make_card
from bench.replay.card.noise import Better, Change, compare
from bench.replay.compare import EXIT_REFUSED, EXIT_WRONG_SETTING, main
from bench.replay.options import parse
from bench.replay.record import Outcome, RequestRecord
from bench.replay.run import Observed, make_result

EXACT = {"numerics": "int8", "exact": True, "inexact_reason": ""}
GOOD_QUALITY = {
    "int8 numerics, int8 KV": {
        "all": {
            "num_tokens": 6144,
            "perplexity_rise_percent": 0.3,
            "divergence_nats": 0.006,
            "top1_agreement_percent": 96.0,
        }
    }
}


def record(index: int, answer: str, ttft_s: float, tpot_s: float) -> RequestRecord:
    times = [ttft_s + tpot_s * step for step in range(4)]
    return RequestRecord(
        100 if index % 2 else 600,
        0.0,
        event_times_s=times,
        ended_s=times[-1],
        outcome=Outcome.COMPLETED,
        request_digest=f"request {index}",
        pieces=[answer],
    )


def run_of(
    *options: str,
    ttft_s: Sequence[float] = (0.1, 0.1),
    tpot_s: float = 0.02,
    answers: Sequence[str] = ("yes", "no"),
    promise: dict[str, object] = EXACT,
) -> dict[str, Any]:
    """A result as the replay makes it, of one short and one long prompt."""
    records = [record(index, *made, tpot_s) for index, made in enumerate(zip(answers, ttft_s, strict=True))]
    parsed = parse(["--url", "http://x", "--out", "x.json", *options])
    run: dict[str, Any] = json.loads(json.dumps(make_result(parsed, Observed("m", promise, [], records, None))))
    return run


BASE = run_of()
FASTER = run_of(tpot_s=0.01)
SLOWER = run_of(tpot_s=0.03)


def card_of(before: dict[str, Any], after: dict[str, Any], quality: object = None, **rules: Any) -> tuple[str, str]:
    card = make_card([before], [after], Rules(**rules), quality)
    return card["decision"], card["reason"]


def test_a_faster_run_with_equal_answers_is_adopted() -> None:
    decision, reason = card_of(BASE, FASTER)
    assert decision == "adopt"
    assert "tpot_ms.p50 is better (20 to 10)" in reason
    assert "all 2 equal requests have equal answers" in reason


def test_the_figures_of_every_slice() -> None:
    slices = make_card([BASE], [FASTER], Rules())["slices"]
    assert list(slices) == ["overall", "0-512", "513-2048"]
    held = slices["513-2048"]["inter_token_ms.p99"]
    assert (held["before"], held["after"], held["ratio"]) == pytest.approx((20, 10, 0.5))
    assert held["change"] == "better"
    assert "kv_bytes" not in slices["overall"], "nothing told of it"


def test_memory_is_of_all_processes_together() -> None:
    before, after = (
        {**BASE, "server": {"peak_memory_bytes": {"gateway": 100, "decode-0": peak}}} for peak in (900, 400)
    )
    slices = make_card([before], [after], Rules())["slices"]
    assert slices["overall"]["peak_memory_bytes"]["ratio"] == 0.5
    assert "peak_memory_bytes" not in slices["0-512"]


def test_a_slower_run_is_rejected_and_an_equal_one_held() -> None:
    tolerant = {"p99_tolerance": 10.0}
    assert card_of(BASE, SLOWER, **tolerant)[0] == "reject"
    decision, reason = card_of(BASE, BASE)
    assert decision == "hold"
    assert "no more than the noise" in reason


def test_a_trade_is_held() -> None:
    after = run_of(ttft_s=(0.2, 0.2), tpot_s=0.01)
    decision, reason = card_of(BASE, after, p99_tolerance=10.0)
    assert decision == "hold"
    assert "for a person to say" in reason


def test_the_slowest_of_any_slice_can_reject_alone() -> None:
    decision, reason = card_of(BASE, run_of(ttft_s=(0.15, 0.1), tpot_s=0.01))
    assert decision == "reject"
    assert "ttft_ms.p99 of 513-2048 rises from 100.0 to 150.0 ms, tolerated are 10%" in reason
    assert card_of(BASE, run_of(ttft_s=(0.15, 0.1), tpot_s=0.01), p99_tolerance=0.6)[0] == "hold"


def test_a_p99_that_is_worse_within_the_noise_holds() -> None:
    decision, reason = card_of(BASE, run_of(ttft_s=(0.15, 0.15), tpot_s=0.01), assumed_noise=0.4)
    assert decision == "hold"
    assert "but within the noise" in reason


def test_other_answers_of_exact_runs_are_rejected() -> None:
    changed = run_of(tpot_s=0.01, answers=("yes", "maybe"))
    decision, reason = card_of(BASE, changed)
    assert decision == "reject"
    assert "1 of 2 equal requests have other answers although every run promises exact ones" in reason
    assert card_of(BASE, changed, GOOD_QUALITY)[0] == "reject", "quality does not excuse a broken promise"
    assert card_of(BASE, changed, GOOD_QUALITY, answers_may_change=True)[0] == "adopt"
    assert card_of(BASE, changed, answers_may_change=True)[0] == "hold"


def test_without_a_promise_the_measured_quality_decides() -> None:
    other = run_of(tpot_s=0.01, answers=("yes", "maybe"), promise={**EXACT, "numerics": "reference"})
    bad = {"texts": {"all": {**GOOD_QUALITY["int8 numerics, int8 KV"]["all"], "perplexity_rise_percent": 0.9}}}
    inexact = {**EXACT, "exact": False}
    assert card_of(run_of(promise=inexact), run_of(tpot_s=0.01, answers=("a", "b"), promise=inexact))[0] == "hold"
    assert card_of(BASE, other)[0] == "hold"
    assert card_of(BASE, other, GOOD_QUALITY)[0] == "adopt"
    decision, reason = card_of(BASE, other, bad)
    assert decision == "reject"
    assert "perplexity +0.90 % of 0.5 %" in reason


def test_unanswered_requests_reject() -> None:
    losing = json.loads(json.dumps(FASTER))
    losing["report"]["overall"]["num_timed_out"] = 1
    assert card_of(BASE, losing) == ("reject", "1 requests of a run got no answer, and 0 before")


def test_several_runs_a_side_measure_the_noise() -> None:
    steady = [run_of(tpot_s=value) for value in (0.0200, 0.0201, 0.0199)]
    better = [run_of(tpot_s=value) for value in (0.0180, 0.0181, 0.0179)]
    shaky = [run_of(tpot_s=value) for value in (0.0130, 0.0230, 0.0180)]
    assert make_card(steady, better, Rules())["decision"] == "adopt"
    assert make_card(steady, shaky, Rules())["decision"] == "hold"


def test_the_noise_is_students_interval() -> None:
    # Means 10 and 12, pooled variance 1, so an error of 1 and 4.303 of it.
    held = compare([10 - 0.5**0.5, 10 + 0.5**0.5], [12 - 0.5**0.5, 12 + 0.5**0.5], Better.LOWER, 0.1)
    assert held.noise == pytest.approx(4.303)
    assert held.change is Change.SAME
    assert compare([10], [12], Better.LOWER, 0.1).change is Change.WORSE
    assert compare([10], [12], Better.HIGHER, 0.2).change is Change.SAME


@pytest.mark.parametrize(
    ("after", "reasons"),
    [
        (run_of("--num-requests", "3"), ["trace.digest is ", "different traffic shapes"]),
        (run_of("--state", "cold"), ["state is warm in b and cold in a"]),
        (run_of("--timeout-s", "5"), ["configuration.timeout_s is 600.0 in b and 5.0 in a"]),
        (run_of("--no-ignore-eos"), ["configuration.ignore_eos is True in b and False in a"]),
    ],
)
def test_other_traffic_is_refused(after: dict[str, Any], reasons: list[str]) -> None:
    refused = "; ".join(refusals([("b", BASE)], [("a", after)], allows_other_hardware=True))
    assert all(reason in refused for reason in reasons), refused


def test_other_hardware_is_refused_unless_allowed() -> None:
    after = {**BASE, "hardware": {**BASE["hardware"], "cores": 96}}
    sides = [("b", BASE)], [("a", after)]
    (reason,) = refusals(*sides, allows_other_hardware=False)
    assert reason == f"different hardware: hardware.cores is {BASE['hardware']['cores']} in b and 96 in a"
    assert refusals(*sides, allows_other_hardware=True) == []
    assert changes(BASE, after) == {"hardware.cores": [BASE["hardware"]["cores"], 96]}


def test_runs_of_one_side_are_alike() -> None:
    other = run_of("--warm-up", "3")
    (reason,) = refusals([("b", BASE), ("c", other)], [("a", BASE)], allows_other_hardware=False)
    assert reason == "different runs of one side: configuration.num_warm_up is 8 in b and 3 in c"
    assert refusals([("b", BASE)], [("a", other)], allows_other_hardware=False) == []
    assert refusals([("b", BASE), ("c", run_of("--notes", "again"))], [("a", BASE)], allows_other_hardware=False) == []


def test_goodput_counts_only_under_equal_objectives() -> None:
    stated, other = run_of("--objective-ttft-ms", "500"), run_of("--objective-ttft-ms", "900")
    assert "goodput_requests_per_s" in make_card([stated], [stated], Rules())["slices"]["overall"]
    assert "goodput_requests_per_s" not in make_card([stated], [other], Rules())["slices"]["overall"]


def write(folder: Path, **contents: object) -> list[str]:
    paths = [folder / f"{name}.json" for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_text(json.dumps(content))
    return [*map(str, paths)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, more, quality = write(tmp_path, before=BASE, after=FASTER, more=FASTER, quality=GOOD_QUALITY)
    card, page = tmp_path / "card.json", tmp_path / "card.html"
    files = ["--out", str(card), "--html", str(page), "--quality", quality]
    assert main([before, after, "--also-before", before, "--also-after", more, *files]) == 0
    assert capsys.readouterr().out.startswith("adopt: ")
    assert json.loads(card.read_text())["num_runs"] == {"before": 2, "after": 2}
    text = page.read_text()
    assert "adopt" in text
    assert str(tmp_path) not in text + card.read_text()


def test_a_stack_that_does_not_start_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local.main(["--topologies", "0p1d", "--out-dir", str(tmp_path / "bench")]) == local.EXIT_STACK
    assert "has no prefill service" in capsys.readouterr().err


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, cold, old = write(tmp_path, before=BASE, cold=run_of("--state", "cold"), old={"format": 1, "requests": []})
    assert main([before, cold]) == EXIT_REFUSED
    assert "state is warm in before.json and cold in cold.json" in capsys.readouterr().err
    assert main([before, old]) == EXIT_WRONG_SETTING
    assert "old.json is no result" in capsys.readouterr().err
    assert main([before, before, "--slice", "2049-8192"]) == EXIT_WRONG_SETTING
    assert "no slice 2049-8192" in capsys.readouterr().err
