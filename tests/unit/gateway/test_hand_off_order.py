"""One attempt's events, in whatever order the two calls bring them."""

from collections.abc import Callable

import pytest

from common.errors import CorruptFrame, PeerLost, PushAbandoned, TransferError, TwostrokeError
from common.pb.decode_pb2 import GenerateEvent, GenerateStats
from common.pb.prefill_pb2 import FirstToken, HandedOff, PrefillEvent
from common.pb.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, OutputToken
from common.sampling import FinishReason
from gateway.generation import KVTransfer, RequestTimes
from gateway.hand_off import HandOff, LegFailed
from gateway.legs import LegEnd, Outcome
from gateway.placement import Role

FIRST = PrefillEvent(first_token=FirstToken(token=OutputToken(token_id=1), num_cached_tokens=16))
HANDED_OFF = PrefillEvent(handed_off=HandedOff(num_blocks_pushed=3))


def tokens(*token_ids: int, is_last: bool = False, cached: int | None = None, queue_s: float = 0.25) -> GenerateEvent:
    """The token at output position n has the id n + 1, in the four tokens of an answer."""
    event = GenerateEvent(
        first_position=token_ids[0] - 1 if token_ids else 4,
        tokens=[OutputToken(token_id=token_id) for token_id in token_ids],
        finish_reason=FINISH_REASON_LENGTH if is_last else FINISH_REASON_UNSPECIFIED,
    )
    if cached is not None:
        event.stats.CopyFrom(GenerateStats(num_cached_tokens=cached, queue_s=queue_s, prefill_s=0.5))
    return event


def outcome_role(outcome: Outcome | tuple[Role, Outcome]) -> tuple[Role, Outcome]:
    if isinstance(outcome, tuple):
        return outcome
    return (Role.PREFILL if isinstance(outcome, PrefillEvent) else Role.DECODE), outcome


class ScriptedLegs:
    def __init__(self, *outcomes: Outcome | tuple[Role, Outcome]) -> None:
        self._outcomes = [outcome_role(outcome) for outcome in outcomes]

    async def next(self) -> tuple[Role, Outcome]:
        return self._outcomes.pop(0)


def ticking() -> Callable[[], float]:
    now_s = 10.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    return clock


def make(*outcomes: Outcome | tuple[Role, Outcome], has_prefill: bool = True) -> tuple[HandOff, RequestTimes]:
    times = RequestTimes()
    legs, transfer = ScriptedLegs(*outcomes), KVTransfer()
    hand_off = HandOff(legs, times, transfer, ticking(), num_delivered=0, has_prefill=has_prefill)  # type: ignore[arg-type]
    return hand_off, times


async def read(hand_off: HandOff) -> list[int]:
    """Token ids until the finish reason."""
    token_ids: list[int] = []
    while True:
        arrival = await hand_off.next()
        token_ids.extend(token.token_id for token in arrival.tokens)
        if arrival.finish_reason is not None:
            assert arrival.finish_reason is FinishReason.LENGTH
            return token_ids


PREFILL_GONE = (Role.PREFILL, LegEnd(PeerLost("gone")))
PREFILL_ENDED = (Role.PREFILL, LegEnd())
DECODE_GONE = (Role.DECODE, LegEnd(PeerLost("gone")))
DECODE_ENDED = (Role.DECODE, LegEnd())
PUSH_ABANDONED = (Role.DECODE, LegEnd(PushAbandoned("no commit"), was_reported=True))

ORDERS: list[tuple[Outcome | tuple[Role, Outcome], ...]] = [
    (FIRST, HANDED_OFF, PREFILL_ENDED, tokens(2, cached=0), tokens(3, 4, is_last=True, cached=0)),
    (FIRST, tokens(2), HANDED_OFF, tokens(3), PREFILL_ENDED, tokens(4, is_last=True)),
    (tokens(2), tokens(3), FIRST, HANDED_OFF, tokens(4, is_last=True)),
    (tokens(2, 3, 4, is_last=True), FIRST),
    (tokens(2), tokens(3, 4, is_last=True), DECODE_ENDED, FIRST),
    (tokens(2, 3, 4, is_last=True), DECODE_GONE, FIRST, HANDED_OFF),
    (FIRST, HANDED_OFF, PREFILL_GONE, tokens(2, 3), tokens(4, is_last=True)),
    (FIRST, tokens(2), PREFILL_GONE, tokens(3), tokens(4, is_last=True)),
    (FIRST, tokens(), tokens(2, 3, 4), tokens(is_last=True)),
]


@pytest.mark.parametrize("outcomes", ORDERS)
async def test_the_client_sees_one_order(outcomes: tuple[Outcome | tuple[Role, Outcome], ...]) -> None:
    hand_off, times = make(*outcomes)
    assert await read(hand_off) == [1, 2, 3, 4]
    assert hand_off.num_cached_tokens == 16, "what was transferred is no cache hit"
    assert times.first_token > 0


@pytest.mark.parametrize(
    ("outcomes", "transfer"),
    [
        # The clock ticks once a look: at the first token twice, then at decode's first event, 0.75 s after its commit.
        ((FIRST, tokens(2, cached=0), tokens(3, 4, is_last=True, cached=0)), KVTransfer(3000, 0.25)),
        ((FIRST, HANDED_OFF, tokens(2, 3, 4, is_last=True, cached=0)), KVTransfer(3000, 0.25)),
        ((tokens(2, cached=0), FIRST, tokens(3, 4, is_last=True)), KVTransfer(3000, 0.25)),
        ((FIRST, tokens(2, cached=0, queue_s=9.0), tokens(3, 4, is_last=True)), KVTransfer(3000, 0.0)),
        ((FIRST, HANDED_OFF, tokens(2, 3, 4, is_last=True)), KVTransfer(None, None)),
    ],
)
async def test_what_the_client_waited_for_the_transfer(
    outcomes: tuple[Outcome | tuple[Role, Outcome], ...], transfer: KVTransfer
) -> None:
    seen = KVTransfer()
    hand_off = HandOff(ScriptedLegs(*outcomes), RequestTimes(), seen, ticking(), num_delivered=0, has_prefill=True)  # type: ignore[arg-type]
    hand_off.kv_bytes = 3000
    await read(hand_off)
    assert seen == transfer


FAILURES: list[tuple[tuple[Outcome | tuple[Role, Outcome], ...], Role, type[TwostrokeError]]] = [
    ((PREFILL_GONE,), Role.PREFILL, PeerLost),
    ((PREFILL_ENDED,), Role.PREFILL, TransferError),
    ((tokens(2), PREFILL_GONE), Role.PREFILL, PeerLost),
    (((Role.PREFILL, LegEnd(PeerLost("decode"), was_reported=True)),), Role.DECODE, PeerLost),
    (((Role.PREFILL, LegEnd(CorruptFrame("x"), was_reported=True)),), Role.PREFILL, CorruptFrame),
    ((DECODE_GONE,), Role.DECODE, PeerLost),
    ((DECODE_ENDED,), Role.DECODE, PeerLost),
    ((tokens(2), DECODE_ENDED), Role.DECODE, PeerLost),
    ((tokens(2), DECODE_GONE), Role.DECODE, PeerLost),
    ((PUSH_ABANDONED, PREFILL_GONE), Role.PREFILL, PeerLost),
    ((PUSH_ABANDONED, FIRST), Role.DECODE, PushAbandoned),
    ((FIRST, PUSH_ABANDONED), Role.DECODE, PushAbandoned),
    ((tokens(2, 3, is_last=True), DECODE_ENDED, PREFILL_GONE), Role.PREFILL, PeerLost),
    ((FIRST, tokens(3, 4, is_last=True)), Role.DECODE, TransferError),
    ((FIRST, tokens(2), tokens(2)), Role.DECODE, TransferError),
    ((FIRST, tokens(2, 3), tokens(is_last=True)), Role.DECODE, TransferError),
    ((FIRST, tokens(3), tokens(2)), Role.DECODE, TransferError),
]


@pytest.mark.parametrize(("outcomes", "role", "kind"), FAILURES)
async def test_who_is_to_blame(
    outcomes: tuple[Outcome | tuple[Role, Outcome], ...], role: Role, kind: type[TwostrokeError]
) -> None:
    hand_off, _ = make(*outcomes)
    with pytest.raises(LegFailed) as caught:
        await read(hand_off)
    assert caught.value.role is role
    assert type(caught.value.error) is kind


async def test_decode_hears_of_an_abandoned_push_before_the_client_has_its_only_token() -> None:
    """Prefill's first token ended the request, so nothing was committed; no worker has failed."""
    last = PrefillEvent(first_token=FirstToken(token=OutputToken(token_id=1), finish_reason=FINISH_REASON_LENGTH))
    hand_off, _ = make(PUSH_ABANDONED, last)
    assert await read(hand_off) == [1]


async def test_a_second_first_token_is_a_failure() -> None:
    hand_off, _ = make(FIRST, FIRST)
    with pytest.raises(LegFailed):
        await read(hand_off)


async def test_decode_alone_tells_times_and_cached_tokens() -> None:
    hand_off, times = make(tokens(1, cached=32), tokens(2, is_last=True, cached=0), has_prefill=False)
    assert await read(hand_off) == [1, 2]
    assert hand_off.num_cached_tokens == 32
    assert (times.first_token, times.queue_s, times.prefill_s) == (11.0, 0.25, 0.5)
