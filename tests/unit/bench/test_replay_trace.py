"""Synthetic and recorded traces, their digest, and the prompts made of them."""

import dataclasses

import pytest

from bench.replay.prompts import PromptMaker
from bench.replay.trace import (
    Arrivals,
    PlannedRequest,
    Segment,
    Trace,
    TraceSettings,
    bucket_of,
    make_trace,
    shared_token_share,
)
from bench.replay.trace_files import read_csv, read_mooncake
from common.errors import ConfigError

MOONCAKE = """
{"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 9]}
""".strip().splitlines()


def test_the_digest_of_a_trace_is_fixed() -> None:
    settings = TraceSettings(
        seed=7, num_requests=20, bucket_weights=(3, 2, 1), shared_prefix_share=0.5, cancel_share=0.2
    )
    assert make_trace(settings).digest() == "db634dfc2f4bcce0b1fb5078fc8f1b199f36dd80f6c3ce167f1ff2868c10893c"


def test_bursts_keep_the_mean_rate() -> None:
    settings = TraceSettings(num_requests=7, arrivals=Arrivals.BURST, burst_size=3, rate_per_s=2.0)
    assert [request.arrival_s for request in make_trace(settings).requests] == [0, 0, 0, 1.5, 1.5, 1.5, 3]


def test_poisson_arrivals_have_the_rate() -> None:
    settings = TraceSettings(num_requests=2000, rate_per_s=4.0)
    arrivals = [request.arrival_s for request in make_trace(settings).requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    # The mean of 1,999 gaps has a standard deviation of 1 / sqrt(1999), 2.2 %, of itself; five of them are 11 %.
    assert arrivals[-1] / 1999 == pytest.approx(0.25, rel=0.11)


def test_a_closed_loop_has_clients_and_no_times() -> None:
    trace = make_trace(TraceSettings(num_requests=5, arrivals=Arrivals.CLOSED, num_clients=3))
    assert trace.num_clients == 3
    assert {request.arrival_s for request in trace.requests} == {0.0}


def test_buckets() -> None:
    lengths = [1, 512, 513, 2048, 2049, 8192, 8193]
    names = ["0-512", "0-512", "513-2048", "513-2048", "2049-8192", "2049-8192", "over 8192"]
    assert [bucket_of(length) for length in lengths] == names


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"burst_size": 0}, "burst_size"),
        ({"num_clients": 0}, "num_clients"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"shared_prefix_share": 1.0}, "shared_prefix_share"),
        ({"cancel_share": 1.5}, "cancel_share"),
        ({"min_input": 0}, "min_input"),
        ({"min_output": 9, "max_output": 8}, "min_output"),
        ({"bucket_weights": (0.0, 0.0, 0.0)}, "bucket_weights"),
        ({"bucket_weights": (0.0, 1.0, 0.0), "max_input": 512}, "max_input"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(TraceSettings(), **changes)  # type: ignore[arg-type]


def test_a_mooncake_trace() -> None:
    trace = read_mooncake(MOONCAKE)
    first, second = trace.requests
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert (first.num_input_tokens, first.num_output_tokens) == (1030, 7)
    assert [part.num_tokens for part in second.segments] == [512, 512, 76]
    assert shared_token_share(trace.requests) == 1024 / 2130
    maker = PromptMaker(0)
    prompts = [maker.prompt(request.segments) for request in trace.requests]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:] != prompts[1][1024:1030]


def test_the_same_block_after_another_is_not_shared() -> None:
    segments = (Segment("block/4", 512), Segment("block/1", 512))
    requests = [PlannedRequest(0.0, 1, segments), PlannedRequest(0.0, 1, segments[::-1])]
    assert shared_token_share(requests) == 0


def test_a_csv_trace() -> None:
    trace = read_csv(["timestamp,input,output", "12.5,100,5", "", "10,2000,6"])
    assert [(r.arrival_s, r.num_input_tokens, r.num_output_tokens) for r in trace.requests] == [
        (0, 2000, 6),
        (2.5, 100, 5),
    ]
    assert shared_token_share(trace.requests) == 0


@pytest.mark.parametrize(
    "line", ["{", "{}", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}']
)
def test_a_wrong_line_of_mooncake_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        read_mooncake([*MOONCAKE, line])


@pytest.mark.parametrize("line", ["1,2", "1,a,3", "1,0,3", "1,3,0"])
def test_a_wrong_line_of_csv_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_csv(["1,2,3", line])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request"):
        read_csv(["timestamp,input,output"])


def test_the_digest_is_of_the_shape_alone() -> None:
    def trace(names: str, seed: int = 0) -> Trace:
        requests = tuple(
            PlannedRequest(0.0, 1, (Segment(name, 5), Segment(f"own {i}", 5))) for i, name in enumerate(names)
        )
        return Trace(seed, Arrivals.RECORDED, None, requests)

    assert trace("aab").digest() == trace("xxy", seed=3).digest()
    assert trace("aab").digest() != trace("abb").digest()


def test_text_prompts_have_a_word_for_each_token() -> None:
    prompt = PromptMaker(3, as_text=True).prompt((Segment("a", 4), Segment("b", 3)))
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 7
