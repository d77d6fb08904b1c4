"""A worker's server: its address, its health, and its end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import ConfigError, TwostrokeError
from common.rpc.channel import open_channel
from common.rpc.server import WorkerServer
from tests.support.echo_service import SERVICE, add_echo, call

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GRACE_S = 60.0


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


@pytest.fixture
async def server() -> AsyncIterator[WorkerServer]:
    server = WorkerServer("127.0.0.1:0", (SERVICE,))
    yield server
    await server.stop(0.0)


async def test_port_zero_is_any_free_port_and_is_told(server: WorkerServer) -> None:
    await server.start()
    host, port = server.address.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    async with open_channel(server.address) as channel:
        assert await health_of(channel) == SERVING


async def test_a_port_in_use_is_named(server: WorkerServer) -> None:
    await server.start()
    port = server.address.rpartition(":")[2]
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=rf"{host}:{port}.*in use"):
            WorkerServer(f"{host}:{port}", allow_unencrypted=True)


@pytest.mark.parametrize("address", ["localhost", ":50051", "localhost:http", "", "127.0.0.1:99999"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=f"'?{address}"):
        WorkerServer(address)


async def test_health_is_told_for_the_server_and_each_service(server: WorkerServer) -> None:
    await server.start(is_serving=False)
    async with open_channel(server.address) as channel:
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [NOT_SERVING] * 2
        await server.set_serving(True)
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "of.somebody.Else")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_then_stops(server: WorkerServer, number: signal.Signals) -> None:
    """While it drains it is not serving by its health, yet calls in flight end well."""
    in_flight, may_finish = asyncio.Event(), asyncio.Event()
    health_while_draining: list[int] = []

    async def handle(request: bytes, context: Any) -> bytes:
        in_flight.set()
        await may_finish.wait()
        return request

    add_echo(server, unary_unary=handle)
    await server.start()
    async with open_channel(server.address) as channel:

        async def drain() -> None:
            health_while_draining.append(await health_of(channel, SERVICE))
            may_finish.set()

        serving = asyncio.create_task(server.serve_until_stopped(drain, GRACE_S))
        answer = asyncio.ensure_future(call(channel, "unary_unary", b"x"))
        await in_flight.wait()
        os.kill(os.getpid(), number)
        await serving
        assert await answer == [b"x"]
        assert health_while_draining == [NOT_SERVING]


async def test_a_drain_that_takes_too_long_is_cut_off(server: WorkerServer) -> None:
    await server.start()
    cancelled = asyncio.Event()

    async def drain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    serving = asyncio.create_task(server.serve_until_stopped(drain, grace_s=0.01))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert cancelled.is_set()


async def test_a_second_signal_cuts_the_drain_short(server: WorkerServer) -> None:
    await server.start()
    draining = asyncio.Event()

    async def drain() -> None:
        draining.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(server.serve_until_stopped(drain, GRACE_S))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await draining.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await serving


async def test_a_drain_that_was_asked_for_goes_on_through_a_first_signal(server: WorkerServer) -> None:
    """Kubernetes may end the pod that an operator drains: that must not cut streams."""
    await server.start()
    draining, may_end = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await may_end.wait()

    serving = asyncio.create_task(server.serve_until_stopped(drain, GRACE_S))
    await asyncio.sleep(0)
    server.request_drain()
    server.request_drain()
    await draining.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    async with open_channel(server.address) as channel:
        assert await health_of(channel, SERVICE) == NOT_SERVING
        assert not serving.done()
    may_end.set()
    await serving


async def test_a_second_signal_cuts_also_a_drain_that_was_asked_for(server: WorkerServer) -> None:
    await server.start()
    serving = asyncio.create_task(server.serve_until_stopped(wait_for_ever, GRACE_S))
    await asyncio.sleep(0)
    server.request_drain()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    await serving


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_drain_that_fails_does_not_keep_the_server(
    server: WorkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    await server.start()

    async def drain() -> None:
        raise ValueError("no such sequence")

    serving = asyncio.create_task(server.serve_until_stopped(drain, GRACE_S))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert "drain failed" in caplog.text


async def test_a_background_task_that_dies_ends_the_server_with_its_error(server: WorkerServer) -> None:
    await server.start()
    engine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve_until_stopped(never, GRACE_S, must_run=(engine,)))
    await asyncio.sleep(0)
    engine.set_exception(ArithmeticError("NaN in layer 3"))
    with pytest.raises(ArithmeticError, match="layer 3"):
        await serving


async def test_a_background_task_that_just_ends_is_an_error_too(server: WorkerServer) -> None:
    await server.start()
    engine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine.set_result(None)
    with pytest.raises(TwostrokeError, match="ended by itself"):
        await server.serve_until_stopped(never, GRACE_S, must_run=(engine,))


async def never() -> None:
    raise AssertionError("there is nothing to drain")
