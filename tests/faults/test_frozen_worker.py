"""A worker that keeps its connection and says nothing is noticed by keepalive, without any deadline on the call."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import PeerLost
from common.rpc.channel import open_channel
from common.rpc.status import rpc_error_to_exception
from tests.support.redis_server import end, wait_for_line


@pytest.fixture
def worker() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "tests.support.frozen_echo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield wait_for_line(process, "address=").strip().partition("=")[2], process
    finally:
        process.kill()
        end(process)


@pytest.mark.timeout(45)  # keepalive is a matter of seconds; gRPC left to itself takes a minute or never notices
async def test_a_frozen_worker_is_a_lost_peer(worker: tuple[str, "subprocess.Popen[str]"]) -> None:
    address, process = worker
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
    assert type(rpc_error_to_exception(cast(grpc.aio.AioRpcError, caught.value), "decode-0")) is PeerLost


async def test_a_terminated_worker_exits_with_zero(worker: tuple[str, "subprocess.Popen[str]"]) -> None:
    _, process = worker
    process.terminate()
    assert end(process) == 0
