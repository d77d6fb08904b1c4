"""What /readyz says, from the first look for workers to the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.discovery import Discovery
from gateway.placement import Role
from gateway.readiness import Readiness
from tests.support.fake_worker import hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import GatewayStack


@asynccontextmanager
async def started(*, strict: bool = False) -> AsyncIterator[tuple[GatewayStack, Readiness]]:
    stack = GatewayStack([FakePrefill("p0")], [FakeDecode("d0")])
    discovery = Discovery({Role.DECODE: ()}, stack.registry.set_addresses, 1.0)
    readiness = Readiness(stack.registry, discovery, stack.admission, needs_prefill=strict)
    assert readiness.why_not_ready() is not None
    try:
        yield stack, readiness
    finally:
        await stack.stop()


async def test_the_first_meeting_is_waited_for_and_later_ones_are_not() -> None:
    async with started() as (stack, readiness):
        prefill = stack.prefill[0]
        prefill.points.actions["describe"] = hang
        await stack.start()
        await stack.until_ready(stack.decode[0])
        reason = readiness.why_not_ready()
        assert reason is not None
        assert "still meeting the workers" in reason
        assert prefill.address in reason
        del prefill.points.actions["describe"]
        stack.registry.set_addresses(Role.PREFILL, [])
        stack.registry.set_addresses(Role.PREFILL, [prefill.address])
        await stack.until_ready()
        assert readiness.why_not_ready() is None
        stack.registry.set_addresses(Role.PREFILL, [])
        stack.registry.set_addresses(Role.PREFILL, [prefill.address])
        assert readiness.why_not_ready() is None


async def test_a_lost_prefill_worker_matters_when_strict() -> None:
    for strict in (False, True):
        async with started(strict=strict) as (stack, readiness):
            await stack.start()
            await stack.until_ready()
            assert readiness.why_not_ready() is None
            await stack.prefill[0].stop()
            await stack.until_lost(stack.prefill[0])
            reason = readiness.why_not_ready()
            assert (reason is not None) == strict
            assert reason is None or "no prefill worker is ready" in reason


async def test_closed_admission_is_not_ready() -> None:
    async with started() as (stack, readiness):
        await stack.start()
        await stack.until_ready()
        stack.admission.close()
        assert readiness.why_not_ready() == "the gateway is shutting down"
