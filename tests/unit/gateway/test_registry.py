"""Who is registered, refused, lost and found again, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.kv.layout import KVFormat, KVLayout
from common.pb import worker_pb2
from common.tokenizer_files import tokenizer_digest
from gateway.placement import Role
from gateway.worker import Worker, WorkerState
from tests.support.fake_worker import FINGERPRINT, LAYOUT, TOKENIZER_FILES, FakeWorker
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import PATIENCE_S, GatewayStack


@asynccontextmanager
async def started(stack: GatewayStack) -> AsyncIterator[GatewayStack]:
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


def worker_of(stack: GatewayStack, fake: FakeWorker) -> Worker:
    return next(worker for worker in stack.registry.workers() if worker.address == fake.address)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop turn until `condition` holds."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            turned = loop.create_future()
            loop.call_soon(turned.set_result, None)
            await turned


def one_each() -> tuple[FakePrefill, FakeDecode, GatewayStack]:
    prefill, decode = FakePrefill("p0"), FakeDecode("d0")
    return prefill, decode, GatewayStack([prefill], [decode])


async def test_first_decode_worker_defines_the_deployment() -> None:
    _, _, stack = one_each()
    assert stack.registry.deployment is None
    async with started(stack):
        await stack.until_ready()
        deployment = stack.registry.deployment
        assert deployment is not None
        assert deployment.fingerprint == FINGERPRINT
        assert deployment.tokenizer_files == TOKENIZER_FILES
        assert (deployment.model_name, deployment.max_model_len) == ("fake-model", 4096)
        assert stack.registry.not_ready() == []


async def test_prefill_waits_for_the_first_decode_worker() -> None:
    prefill, decode, stack = one_each()
    await asyncio.gather(prefill.start(), decode.start())
    stack.registry.set_addresses(Role.PREFILL, [prefill.address])
    try:
        await until(lambda: worker_of(stack, prefill).info.worker_id == "p0")
        assert not worker_of(stack, prefill).is_ready
        assert "waits for the first decode worker" in stack.registry.not_ready()[0]
        stack.registry.set_addresses(Role.DECODE, [decode.address])
        await stack.until_ready()
    finally:
        await stack.stop()


async def check_refused(fake: FakeWorker, stack: GatewayStack, *named: str) -> None:
    """Refused with every one of `named` in the reason."""
    async with started(stack):
        await until(lambda: worker_of(stack, fake).state is WorkerState.REFUSED)
        [reason] = [reason for reason in stack.registry.not_ready() if fake.address in reason]
        for value in named:
            assert value in reason


async def test_another_fingerprint_is_refused_and_asked_again() -> None:
    prefill, decode, stack = one_each()
    prefill.fingerprint = b"\xab" * 32
    async with started(stack):
        await stack.until_ready(decode)
        await until(lambda: worker_of(stack, prefill).state is WorkerState.REFUSED)
        [reason] = stack.registry.not_ready()
        assert FINGERPRINT.hex() in reason
        assert (b"\xab" * 32).hex() in reason
        assert "p0" in reason
        prefill.fingerprint = FINGERPRINT
        await stack.until_ready()
        assert stack.registry.not_ready() == []


async def test_another_layout_is_refused() -> None:
    prefill, _, stack = one_each()
    prefill.layout = KVLayout(KVFormat.FP32, 16, 2, 1, 8)
    await check_refused(prefill, stack, "int8 block_size=16", "fp32 block_size=16")


@pytest.mark.parametrize("changed", [{"block_size": 32}, {"num_layers": 3}, {"head_dim": 16}])
async def test_another_shape_is_refused_with_both_and_not_as_another_digest(changed: dict[str, int]) -> None:
    prefill, _, stack = one_each()
    prefill.layout = replace(prefill.layout, **changed)
    prefill.fingerprint = b"\xab" * 32
    await check_refused(prefill, stack, LAYOUT.describe(), prefill.layout.describe(), "KV layout")


async def test_another_numeric_path_is_refused_by_name() -> None:
    prefill, _, stack = one_each()
    prefill.numerics, prefill.fingerprint = "int8", b"\xab" * 32
    await check_refused(prefill, stack, "numerics int8", "numerics fake")


def unquantized(fake: FakeWorker, as_int8: bytes) -> None:
    fake.layout = replace(LAYOUT, format=KVFormat.FP32)
    fake.fingerprint = b"\xab" * 32
    fake.narrower_fingerprints = {"int8": as_int8}


async def test_a_prefill_worker_with_a_wider_format_and_all_else_equal_is_taken_and_the_deployment_says_so() -> None:
    prefill, _, stack = one_each()
    unquantized(prefill, FINGERPRINT)
    async with started(stack):
        await stack.until_ready()
        deployment = stack.registry.deployment
        assert deployment is not None
        assert (deployment.fingerprint, deployment.layout, deployment.is_exact) == (FINGERPRINT, LAYOUT, False)
        for part in ("p0", "fp32", "int8", "depends on which of them computed the prompt"):
            assert part in deployment.inexact_reason


async def test_a_wider_format_of_another_model_is_refused() -> None:
    prefill, _, stack = one_each()
    unquantized(prefill, b"\xcd" * 32)
    await check_refused(prefill, stack, (b"\xcd" * 32).hex(), FINGERPRINT.hex(), "model fingerprint")


async def test_a_wider_format_of_another_block_size_is_refused() -> None:
    prefill, _, stack = one_each()
    unquantized(prefill, FINGERPRINT)
    prefill.layout = replace(prefill.layout, block_size=32)
    await check_refused(prefill, stack, "fp32 block_size=32", "int8 block_size=16")


async def test_a_decode_worker_with_a_wider_format_is_refused() -> None:
    """It only receives; and what it computes itself would be other values under the same names."""
    decodes = [FakeDecode("d0"), FakeDecode("d1")]
    stack = GatewayStack([], decodes)
    async with started(stack):
        await stack.until_ready()
        unquantized(decodes[1], FINGERPRINT)
        await decodes[1].stop()
        await decodes[1].start()
        await until(lambda: worker_of(stack, decodes[1]).state is WorkerState.REFUSED)
        [reason] = stack.registry.not_ready()
        assert "fp32 block_size=16" in reason


async def test_a_narrower_prefill_is_refused() -> None:
    prefill, decode, stack = one_each()
    decode.layout = replace(LAYOUT, format=KVFormat.FP32)
    await check_refused(prefill, stack, "int8 block_size=16", "fp32 block_size=16")


async def test_another_tokenizer_is_refused() -> None:
    prefill, _, stack = one_each()
    prefill.announced_digest = b"\x01" * 32
    await check_refused(prefill, stack, (b"\x01" * 32).hex(), tokenizer_digest(TOKENIZER_FILES).hex())


async def test_a_tokenizer_that_is_not_what_was_named_is_refused() -> None:
    _, decode, stack = one_each()
    decode.tokenizer_files = {"tokenizer.json": b"{ }"}
    await check_refused(decode, stack, tokenizer_digest(TOKENIZER_FILES).hex())
    assert stack.registry.deployment is None


async def test_another_role_is_refused() -> None:
    prefill, _, stack = one_each()
    prefill.announced_role = worker_pb2.ROLE_DECODE
    await check_refused(prefill, stack, "role is decode", "configured as prefill")


async def test_two_workers_with_one_id_are_not_both_taken() -> None:
    decodes = [FakeDecode("d0"), FakeDecode("d0")]
    stack = GatewayStack([], decodes)
    async with started(stack):
        states = [WorkerState.READY, WorkerState.REFUSED]
        await until(lambda: sorted(worker.state for worker in stack.registry.workers()) == states)
        assert "ids must differ" in stack.registry.not_ready()[0]


async def test_lost_at_once_and_found_again() -> None:
    _, decode, stack = one_each()
    async with started(stack):
        await stack.until_ready()
        worker = worker_of(stack, decode)
        first, registration = decode.incarnation, worker.registration
        await decode.stop()
        await stack.until_lost(decode)
        assert worker.state is WorkerState.LOST
        assert decode.address in stack.registry.not_ready()[0]
        await decode.start()
        await stack.until_ready()
        assert worker.info.incarnation == decode.incarnation != first
        assert worker.registration > registration


async def test_a_restart_seen_in_the_status_alone() -> None:
    """Another process answers at the address before the connection was seen to break."""
    _, decode, stack = one_each()
    async with started(stack):
        await stack.until_ready()
        before = worker_of(stack, decode).registration
        decode.incarnation = b"\x02" * 16
        decode.set_status(num_running=1)
        await until(lambda: worker_of(stack, decode).registration > before)
        assert worker_of(stack, decode).info.incarnation == b"\x02" * 16


async def test_status_and_claims_make_the_load() -> None:
    prefill, decode, stack = one_each()
    async with started(stack):
        await stack.until_ready()
        decode.set_status(free_blocks=1000, num_running=2, num_waiting=1, is_draining=True)
        await until(lambda: worker_of(stack, decode).status.is_draining)
        view = worker_of(stack, decode).view()
        assert (view.free_blocks, view.num_sequences, view.takes_work) == (1000, 3, False)
        worker = worker_of(stack, prefill)
        claims = [worker.claim(num_tokens=100, num_sequences=1) for _ in range(2)]
        assert (worker.view().queued_tokens, worker.view().num_sequences) == (200, 2)
        prefill.set_status(queued_tokens=150)
        await until(lambda: worker.status.queued_tokens == 150)
        assert worker.view().queued_tokens == 200
        claims[0].end()
        claims[0].end()
        assert worker.view().queued_tokens == 150


async def test_a_removed_address_is_gone() -> None:
    prefill, _, stack = one_each()
    async with started(stack):
        await stack.until_ready()
        stack.registry.set_addresses(Role.PREFILL, [])
        assert [worker.role for worker in stack.registry.workers()] == [Role.DECODE]
        stack.registry.set_addresses(Role.PREFILL, [prefill.address])
        await stack.until_ready()


async def test_refusals_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    prefill, _, stack = one_each()
    prefill.fingerprint = b"\xab" * 32
    async with started(stack):
        await until(lambda: prefill.points.num_reached["describe"] >= 4)
    assert sum("model fingerprint" in record.message for record in caplog.records) == 1
