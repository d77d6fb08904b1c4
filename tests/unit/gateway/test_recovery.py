"""The table of failures and what follows each."""

from dataclasses import replace

import pytest

from common.errors import (
    BadRequest,
    Cancelled,
    CorruptFrame,
    Draining,
    NoRoom,
    NumericFailure,
    PeerLost,
    TwostrokeError,
)
from gateway.generation import OnFailure
from gateway.placement import Fallback, Role
from gateway.recovery import Failure, NextStep, Recovery, recover

BASE = Failure(
    role=Role.PREFILL,
    error=PeerLost("gone"),
    is_running=True,
    had_prefill=True,
    has_tokens=False,
    prefill_retried=False,
    other_prefill=True,
    retries_left=2,
    strict=False,
)
AGAIN, RECOMPUTE, GIVE_UP = NextStep.AGAIN, NextStep.RECOMPUTE, Recovery(NextStep.GIVE_UP)
MOVE = Recovery(NextStep.MOVE)
ALONE = replace(BASE, role=Role.DECODE, had_prefill=False, other_prefill=False)

CASES = [
    (BASE, Recovery(AGAIN, Fallback.PREFILL_RETRIED)),
    (replace(BASE, prefill_retried=True), Recovery(RECOMPUTE, Fallback.PREFILL_LOST)),
    (replace(BASE, other_prefill=False), Recovery(RECOMPUTE, Fallback.PREFILL_LOST)),
    (replace(BASE, has_tokens=True), Recovery(RECOMPUTE, Fallback.PREFILL_LOST)),
    (replace(BASE, error=CorruptFrame("x")), Recovery(AGAIN, Fallback.PREFILL_RETRIED)),
    (replace(BASE, error=CorruptFrame("x"), has_tokens=True), Recovery(RECOMPUTE, Fallback.TRANSFER_FAILED)),
    (replace(BASE, role=Role.DECODE, error=CorruptFrame("x")), Recovery(AGAIN, Fallback.PREFILL_RETRIED)),
    (replace(BASE, role=Role.DECODE), Recovery(AGAIN, Fallback.DECODE_RETRIED)),
    (replace(BASE, role=Role.DECODE, has_tokens=True), MOVE),
    (replace(BASE, role=Role.DECODE, has_tokens=True, strict=True), MOVE),
    (replace(BASE, role=Role.DECODE, has_tokens=True, error=NoRoom("x")), Recovery(RECOMPUTE, Fallback.DECODE_LOST)),
    (
        replace(BASE, role=Role.DECODE, is_running=False, error=CorruptFrame("x")),
        Recovery(AGAIN, Fallback.DECODE_RETRIED),
    ),
    (ALONE, Recovery(AGAIN, Fallback.DECODE_RETRIED)),
    (replace(ALONE, error=Cancelled("x")), Recovery(AGAIN, Fallback.DECODE_RETRIED)),
    (replace(ALONE, has_tokens=True), Recovery(RECOMPUTE, Fallback.DECODE_LOST)),
    (replace(BASE, retries_left=0), GIVE_UP),
    (replace(BASE, error=BadRequest("x")), GIVE_UP),
    (replace(BASE, error=NumericFailure("x")), GIVE_UP),
    (replace(BASE, error=TwostrokeError("x")), GIVE_UP),
    (replace(BASE, error=NoRoom("x")), Recovery(AGAIN)),
    (replace(BASE, error=NoRoom("x"), retries_left=0), Recovery(AGAIN)),
    (replace(ALONE, error=Draining("x")), Recovery(AGAIN)),
    (replace(ALONE, error=Draining("x"), has_tokens=True), Recovery(RECOMPUTE, Fallback.DECODE_LOST)),
    (replace(BASE, strict=True), Recovery(AGAIN, Fallback.PREFILL_RETRIED)),
    (replace(BASE, strict=True, other_prefill=False), GIVE_UP),
    (replace(BASE, strict=True, prefill_retried=True), Recovery(AGAIN, Fallback.PREFILL_RETRIED)),
    (replace(BASE, strict=True, has_tokens=True), GIVE_UP),
    (replace(ALONE, strict=True), Recovery(AGAIN, Fallback.DECODE_RETRIED)),
    (replace(ALONE, strict=True, has_tokens=True), GIVE_UP),
    (replace(BASE, on_failure=OnFailure.FAIL), GIVE_UP),
    (replace(BASE, on_failure=OnFailure.FAIL, role=Role.DECODE, has_tokens=True), GIVE_UP),
    (replace(BASE, on_failure=OnFailure.FAIL, error=CorruptFrame("x")), GIVE_UP),
    (replace(BASE, on_failure=OnFailure.FAIL, error=NoRoom("x")), Recovery(AGAIN)),
    (replace(BASE, on_failure=OnFailure.RECOMPUTE), Recovery(RECOMPUTE, Fallback.PREFILL_LOST)),
    (
        replace(BASE, on_failure=OnFailure.RECOMPUTE, error=CorruptFrame("x")),
        Recovery(RECOMPUTE, Fallback.TRANSFER_FAILED),
    ),
    (
        replace(BASE, on_failure=OnFailure.RECOMPUTE, role=Role.DECODE, has_tokens=True),
        Recovery(RECOMPUTE, Fallback.DECODE_LOST),
    ),
    (replace(BASE, on_failure=OnFailure.RECOMPUTE, role=Role.DECODE), Recovery(AGAIN, Fallback.DECODE_RETRIED)),
    (replace(BASE, on_failure=OnFailure.RECOMPUTE, strict=True), GIVE_UP),
]


@pytest.mark.parametrize(("failure", "expected"), CASES)
def test_recovery(failure: Failure, expected: Recovery) -> None:
    assert recover(failure) == expected
