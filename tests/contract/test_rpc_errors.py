"""Errors cross a real gRPC connection as the class they are; what is no error of ours stays at home."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.errors import (
    BadRequest,
    Cancelled,
    NoRoom,
    PeerLost,
    StaleGeneration,
    TwostrokeError,
    UnsupportedParameter,
    all_error_classes,
)
from common.rpc.channel import open_channel
from common.rpc.limits import MAX_MESSAGE_BYTES
from common.rpc.status import MAX_MESSAGE_CHARS, rpc_error_to_exception
from tests.support.echo_service import KINDS, call, running_echo
from tests.support.redis_server import free_port

PEER = "decode-0"


async def error_of(channel: grpc.aio.Channel, kind: str = "unary_unary") -> TwostrokeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind, b"x")
    return rpc_error_to_exception(caught.value, PEER)


def raising(error: BaseException) -> Any:
    async def handle(request: Any, context: Any) -> bytes:
        raise error

    return handle


def streaming_then_raising(error: BaseException) -> Any:
    async def handle(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    return handle


@pytest.mark.parametrize("error_class", all_error_classes())
async def test_every_class_arrives_as_itself(error_class: type[TwostrokeError]) -> None:
    sent = error_class("block 7: wanted 3, got 5", param="max_tokens", retry_after_s=1.5)
    async with running_echo(unary_unary=raising(sent)) as channel:
        received = await error_of(channel)
    assert type(received) is error_class
    assert (received.message, received.param, received.retry_after_s) == (sent.message, "max_tokens", 1.5)


@pytest.mark.parametrize("error_class", all_error_classes())
def test_every_class_has_statuses_that_exist(error_class: type[TwostrokeError]) -> None:
    assert grpc.StatusCode[error_class.grpc_status] is not grpc.StatusCode.OK
    assert 400 <= error_class.http_status < 600


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_carries_errors(kind: str) -> None:
    error = StaleGeneration("generation 1; the transfer is at 2")
    handler = streaming_then_raising(error) if kind.endswith("stream") else raising(error)
    async with running_echo(**{kind: handler}) as channel:
        assert type(await error_of(channel, kind)) is StaleGeneration


async def test_without_param_and_retry_there_is_none() -> None:
    async with running_echo(unary_unary=raising(BadRequest("no"))) as channel:
        received = await error_of(channel)
    assert (received.param, received.retry_after_s) == (None, None)


async def test_any_text_survives() -> None:
    sent = UnsupportedParameter("paramètre « 温度 »\nnot supported: 100 %", param="温度\r\nx: y")
    async with running_echo(unary_unary=raising(sent)) as channel:
        received = await error_of(channel)
    assert (received.message, received.param) == (sent.message, sent.param)


@pytest.mark.parametrize("char", ["x", "温"])
async def test_a_very_long_message_is_cut_and_the_class_survives(char: str) -> None:
    sent = NoRoom(char * 100_000, param=char * 100_000)
    async with running_echo(unary_unary=raising(sent)) as channel:
        received = await error_of(channel)
    assert type(received) is NoRoom
    assert received.message == char * MAX_MESSAGE_CHARS


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_is_logged_and_not_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    error = ZeroDivisionError("the secret prompt")
    handler = streaming_then_raising(error) if kind.endswith("stream") else raising(error)
    with caplog.at_level(logging.ERROR, "twostroke"):
        async with running_echo(**{kind: handler}) as channel:
            received = await error_of(channel, kind)
    assert type(received) is TwostrokeError
    assert "secret" not in received.message
    record = next(record for record in caplog.records if record.name == "twostroke.rpc")
    assert kind in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_a_status_that_a_handler_set_itself_is_kept() -> None:
    async def handle(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
        return b""

    async with running_echo(unary_unary=handle) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary", b"x")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "mine")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, PeerLost),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NoRoom),
        (grpc.StatusCode.UNIMPLEMENTED, TwostrokeError),
        (grpc.StatusCode.INTERNAL, PeerLost),
        (grpc.StatusCode.UNKNOWN, PeerLost),
        (grpc.StatusCode.DATA_LOSS, PeerLost),
    ],
)
@pytest.mark.parametrize("trailer", [(), (("twostroke-error", "AClassOfTomorrow"),)])
def test_a_status_without_a_class_of_ours(
    status: grpc.StatusCode, expected: type[TwostrokeError], trailer: Any
) -> None:
    error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), "went away", None)
    translated = rpc_error_to_exception(error, PEER)
    assert type(translated) is expected
    assert translated.message == f"{PEER} answered {status.name}: went away"


def test_numbers_that_are_none_are_ignored() -> None:
    trailer = grpc.aio.Metadata(("twostroke-error", "NoRoom"), ("twostroke-retry-after-s", "soon"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailer, "full", None)
    assert rpc_error_to_exception(error, PEER).retry_after_s is None


async def test_nobody_there_is_a_lost_peer() -> None:
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        assert type(await error_of(channel)) is PeerLost


async def test_a_passed_deadline_is_a_lost_peer() -> None:
    async def never(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with running_echo(unary_unary=never) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/twostroke.test.Echo/unary_unary")(b"x", timeout=0.05)
    assert type(rpc_error_to_exception(caught.value, PEER)) is PeerLost


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_cancelling_a_stream_closes_its_generator_at_once(kind: str) -> None:
    """The client is gone while the generator waits at its `yield` or inside: `finally` runs either way."""
    closed = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with running_echo(**{kind: endless}) as channel:
        method = getattr(channel, kind)(f"/twostroke.test.Echo/{kind}")
        running = method(b"x") if kind == "unary_stream" else method(_one(b"x"))
        async for response in running:
            assert response == b"first"
            running.cancel()
            break
        await closed.wait()


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_cancelling_a_task_that_reads_cancels_the_call(kind: str) -> None:
    """From the first response on; before it only the call's own `cancel` does."""
    first_read, closed = asyncio.Event(), asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with running_echo(**{kind: endless}) as channel:
        method = getattr(channel, kind)(f"/twostroke.test.Echo/{kind}")

        async def read() -> None:
            async for _ in method(b"x") if kind == "unary_stream" else method(_one(b"x")):
                first_read.set()

        reading = asyncio.ensure_future(read())
        await first_read.wait()
        reading.cancel()
        await closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_an_error_after_the_client_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that turns its cancellation into an error of ours must not be reported as a fault of the worker."""
    entered, left = asyncio.Event(), asyncio.Event()

    async def handle(request: bytes, context: Any) -> bytes:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise Cancelled("the caller went away") from None
        return b""

    with caplog.at_level(logging.ERROR):
        async with running_echo(unary_unary=handle) as channel:
            pending = asyncio.ensure_future(call(channel, "unary_unary", b"x"))
            await entered.wait()
            pending.cancel()
            await left.wait()
            await asyncio.gather(pending, return_exceptions=True)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("size", [0, 5 * 2**20, MAX_MESSAGE_BYTES - 1024])
async def test_messages_up_to_the_limit_pass_both_ways(size: int) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async with running_echo(unary_unary=echo) as channel:
        assert len((await call(channel, "unary_unary", bytes(size)))[0]) == size


async def _one(request: bytes) -> AsyncIterator[bytes]:
    yield request
