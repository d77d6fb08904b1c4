"""Laws of traces and of percentiles, for any settings."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay import draws
from bench.replay.prompts import PromptMaker
from bench.replay.report import percentile
from bench.replay.trace import BUCKETS, Arrivals, Segment, TraceSettings, make_trace

SYNTHETIC = [Arrivals.POISSON, Arrivals.BURST, Arrivals.CLOSED]
settings_of_traces = st.builds(
    TraceSettings,
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 30),
    arrivals=st.sampled_from(SYNTHETIC),
    rate_per_s=st.floats(0.01, 1000),
    burst_size=st.integers(1, 9),
    bucket_weights=st.tuples(*[st.sampled_from([0.0, 0.5, 3.0])] * 3).filter(any),
    min_input=st.integers(1, 500),
    min_output=st.integers(1, 16),
    max_output=st.integers(16, 64),
    shared_prefix_share=st.sampled_from([0.0, 0.5, 0.9]),
    num_prefixes=st.integers(1, 3),
    cancel_share=st.sampled_from([0.0, 0.3, 1.0]),
)
values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)
percents = st.floats(0, 100)


@given(settings_of_traces)
def test_a_trace_is_a_function_of_its_settings(settings: TraceSettings) -> None:
    assert make_trace(settings) == make_trace(settings)
    assert make_trace(settings).digest() == make_trace(settings).digest()


@given(settings_of_traces)
def test_a_trace_keeps_its_settings(settings: TraceSettings) -> None:
    trace = make_trace(settings)
    assert len(trace.requests) == settings.num_requests
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(trace.requests))
    drawn = [bounds for bounds, weight in zip(BUCKETS, settings.bucket_weights, strict=True) if weight]
    for request in trace.requests:
        assert any(low <= request.num_input_tokens <= high for low, high in drawn)
        assert request.num_input_tokens >= settings.min_input
        assert settings.min_output <= request.num_output_tokens <= settings.max_output
        if settings.cancel_share in (0.0, 1.0):
            assert (request.cancel_after is not None) == bool(settings.cancel_share)
        assert request.cancel_after is None or 1 <= request.cancel_after <= request.num_output_tokens


@given(settings_of_traces)
def test_the_shared_share_holds_for_every_request(settings: TraceSettings) -> None:
    for request in make_trace(settings).requests:
        shared = sum(part.num_tokens for part in request.segments if part.name.startswith("prefix/"))
        assert shared == int(request.num_input_tokens * settings.shared_prefix_share)


@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 300))
def test_segments_of_one_name_begin_alike_and_others_do_not(seed: int, shorter: int, more: int) -> None:
    maker = PromptMaker(seed)
    short, long = maker.prompt((Segment("a", shorter),)), maker.prompt((Segment("a", shorter + more),))
    assert isinstance(long, list)
    assert long[:shorter] == short
    assert all(maker.first_token_id <= token_id <= maker.last_token_id for token_id in long)
    assert maker.prompt((Segment("b", 64),)) != maker.prompt((Segment("a", 64),))


@given(st.floats(0, 1, exclude_max=True), st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(any))
def test_an_index_without_weight_is_never_chosen(uniform: float, weights: list[float]) -> None:
    assert weights[draws.weighted(uniform, weights)] > 0


@given(values, percents)
def test_percentiles_are_numpy_s(numbers: list[float], percent: float) -> None:
    # Both interpolate between the same two values; each rounds a few times, at the size of the larger one.
    expected = float(np.percentile(numbers, percent))
    assert percentile(numbers, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(values, percents, percents)
def test_percentiles_rise_and_stay_within(numbers: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    rounding = 1e-12 * max(abs(number) for number in numbers)
    assert min(numbers) - rounding <= percentile(numbers, low) <= percentile(numbers, high) + rounding
    assert percentile(numbers, high) <= max(numbers) + rounding
