"""Fault injection: a plan names points and kinds that are there, decisions repeat, and each kind does what it says."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from common.errors import ConfigError
from common.faults.injector import Injector, install, installed
from common.faults.plan import FaultPlan, FaultRule, parse_plan
from common.faults.points import KINDS_AT, FaultKind, Point
from common.kv.wire import Frame, make_frame, verified_payload
from common.rpc.faulty import faulty_stream
from gateway.config import GatewaySettings
from prefill_svc.config import PrefillSettings
from tests.support.fake_runner import fake_layout

PLAN = "kv.ack:drop@0.01, kv.frame_sent:flip@1,decode.stream:delay@0.5~0.25;seed=7"


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    yield
    install(None)


def test_a_plan_in_one_line() -> None:
    assert parse_plan(PLAN) == FaultPlan(
        (
            FaultRule(Point.ACK, FaultKind.DROP, 0.01),
            FaultRule(Point.FRAME_SENT, FaultKind.FLIP, 1.0),
            FaultRule(Point.DECODE_STREAM, FaultKind.DELAY, 0.5, 0.25),
        ),
        seed=7,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kv.ack", "'kv.ack' is not point:kind@probability"),
        ("kv.nack:drop@0.1", "'kv.nack' is no point; there are kv.frame_sent, "),
        ("kv.ack:flip@0.1", "'flip' is no fault of kv.ack; there are delay, "),
        ("kv.ack:drop@2", "'kv.ack:drop@2': the probability must be from 0 to 1"),
        ("kv.ack:drop@0.1.1", "'0.1.1' is no number"),
        ("kv.ack:drop@0.1;sead=3", "'sead=3' after the semicolon"),
    ],
)
def test_what_a_plan_gets_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(text)
    assert named in str(caught.value)


@pytest.mark.parametrize("settings", [PrefillSettings, GatewaySettings])
def test_faults_need_to_be_allowed_too(settings: type[PrefillSettings] | type[GatewaySettings]) -> None:
    assert settings.load([]).fault_plan() is None
    with pytest.raises(ConfigError, match="allow_fault_injection is not; never set either in production"):
        settings.load(["--faults", PLAN])
    with pytest.raises(ConfigError, match="is no point"):
        settings.load(["--faults", "x:drop@1", "--allow-fault-injection"])
    assert settings.load(["--faults", PLAN, "--allow-fault-injection"]).fault_plan() == parse_plan(PLAN)


def test_nothing_is_installed_by_default() -> None:
    assert installed() is None


def test_decisions_repeat_and_keep_to_their_probability() -> None:
    plan = parse_plan("kv.ack:drop@0.2,kv.ack:delay@0.1;seed=3")
    runs = [[injector.draw(Point.ACK) for _ in range(2_000)] for injector in (Injector(plan), Injector(plan))]
    assert runs[0] == runs[1]
    drops = sum(1 for fault in runs[0] if fault is not None and fault.kind is FaultKind.DROP)
    assert 300 < drops < 500
    assert Injector(plan).draw(Point.COMMIT) is None


def test_every_point_has_kinds_and_every_kind_a_point() -> None:
    assert set(KINDS_AT) == set(Point)
    assert set().union(*KINDS_AT.values()) == set(FaultKind)


def frames(count: int) -> list[Frame]:
    layout = fake_layout(4)
    made = [make_frame(number, number, 1, bytes([number + 1]) * layout.block_bytes) for number in range(count)]
    for frame in made:
        frame.encode_ahead()  # as the sender does with most
    return made


async def passed(kind: FaultKind, count: int = 3, *, only_first: bool = False) -> list[Frame]:
    """What is left of `count` frames after a stream on which each (or the first) suffers `kind`."""
    injector = Injector(FaultPlan((FaultRule(Point.FRAME_SENT, kind, 1.0, delay_s=0.0),), seed=1))

    async def sent() -> AsyncIterator[Frame]:
        for frame in frames(count):
            yield frame

    is_first = True

    def point(_: object) -> Point:
        nonlocal is_first
        chosen = Point.FRAME_SENT if is_first or not only_first else Point.ACK
        is_first = False
        return chosen

    return [frame async for frame in faulty_stream(sent(), point, injector)]


async def test_lost_repeated_late_and_delayed_messages() -> None:
    assert [f.head.sequence_number for f in await passed(FaultKind.DROP, only_first=True)] == [1, 2]
    assert [f.head.sequence_number for f in await passed(FaultKind.DUPLICATE, only_first=True)] == [0, 0, 1, 2]
    assert [f.head.sequence_number for f in await passed(FaultKind.REORDER, only_first=True)] == [1, 0, 2]
    assert [f.head.sequence_number for f in await passed(FaultKind.REORDER, 1)] == [0], "late, and not lost"
    assert await passed(FaultKind.DELAY) == frames(3)


@pytest.mark.parametrize("kind", [FaultKind.FLIP, FaultKind.TRUNCATE])
async def test_a_damaged_frame_is_found_out(kind: FaultKind) -> None:
    damaged = await passed(kind)
    assert [frame.head.sequence_number for frame in damaged] == [0, 1, 2], "the payload is what is damaged"
    for frame in [*damaged, *(Frame.decode(frame.encode()) for frame in damaged)]:
        with pytest.raises(Exception, match=r"CRC-32C is|bytes for 1 blocks"):
            verified_payload(frame, fake_layout(4))


async def test_a_stall_lasts_until_the_call_is_cancelled() -> None:
    stalled = asyncio.create_task(passed(FaultKind.STALL))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stalled.done()
    stalled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stalled
