"""Ratios of pushes and waits: pure, and wrong in ways that flatter if wrong."""

import pytest

from bench.hand_off.report import PushTimes, Waits, push_figures, table, wait_figures


def test_a_ratio_is_of_pushes_and_raw_streams_of_one_round() -> None:
    figures = push_figures(PushTimes(1024, 12_000_000, raw_s=[0.01, 0.04, 0.02], push_s=[0.02, 0.05, 0.02]))
    assert figures["raw_best_gb_per_s"] == pytest.approx(1.2)
    assert figures["push_best_gb_per_s"] == pytest.approx(0.6)
    assert figures["ratio_of_best"] == pytest.approx(0.5)
    assert figures["median_ratio"] == pytest.approx(0.8), "of 0.5, 0.8 and 1, not of the medians"


def test_shares_and_ratios_are_each_request_s_own() -> None:
    waits = Waits(
        4096,
        ttft_s=[1.0, 10.0, 2.0],
        exposed_s=[0.01, 0.2, 0.05],
        second_token_s=[0.02, 0.2, 0.03],
        tpot_s=[0.01, 0.2, 0.02],
    )
    figures = wait_figures(waits)
    assert (figures["num_requests"], figures["ttft_ms"]) == (3, 2000)
    assert figures["exposed_share"] == pytest.approx(0.02), "of 1 %, 2 % and 2.5 %"
    assert figures["second_token_ratio"] == pytest.approx(1.5), "of 2, 1 and 1.5"


def test_the_table_has_a_row_for_each_length_and_leaves_out_a_part_that_was_not_run() -> None:
    push = push_figures(PushTimes(1024, 12_165_120, raw_s=[0.01], push_s=[0.0125]))
    wait = wait_figures(Waits(4096, ttft_s=[4.0], exposed_s=[0.02], second_token_s=[0.018], tpot_s=[0.012]))
    both = table([push], [wait]).splitlines()
    assert "| 1,024 tokens, 12,165,120 bytes | 1.22 | 0.97 | 0.80 | 0.80 |" in both
    assert "| 4,096 tokens | 4,000 | 20.0 | 0.50% | 18.0 | 12.0 | 1.50 |" in both
    assert len(table([push], []).splitlines()) == 3
    assert len(table([], [wait]).splitlines()) == 3
