"""The time to the first token, taken apart: the parts are all of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.names import TTFT_PARTS
from gateway.generation import RequestTimes
from gateway.record import ttft_parts, ttft_s

# Sixteenths of a second add up without rounding.
sixteenths = st.integers(0, 16_000).map(lambda n: n / 16)


@given(st.builds(RequestTimes, **dict.fromkeys(RequestTimes.__dataclass_fields__, sixteenths)))
def test_the_parts_add_up_whatever_the_times(times: RequestTimes) -> None:
    parts = ttft_parts(times)
    assert tuple(parts) == TTFT_PARTS
    assert sum(parts.values()) == ttft_s(times)


def test_each_part_is_what_it_says() -> None:
    times = RequestTimes(
        received=100.0,
        tokenize_s=0.25,
        dispatched=100.5,
        place_s=0.125,
        reserve_s=0.5,
        run_started=101.5,
        queue_s=1.0,
        prefill_s=2.0,
        transfer_s=0.25,
        first_token=105.0,
        first_byte=105.5,
    )
    parts = {name.removeprefix("twostroke.ttft."): value for name, value in ttft_parts(times).items()}
    assert parts == {
        "tokenize_s": 0.25,
        "admission_s": 1.5 - 0.25 - 0.125 - 0.5,
        "place_s": 0.125,
        "reserve_s": 0.5,
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "transfer_s": 0.25,
        "network_s": 3.5 - 3.25,
        "respond_s": 0.5,
    }
    assert ttft_s(times) == pytest.approx(5.5)
