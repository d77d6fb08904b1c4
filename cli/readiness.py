"""How to tell that a service serves. Each waits without end; whoever waits watches the process and the clock."""

import asyncio
import contextlib

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.errors import CommandError
from common.rpc.channel import Connector

RETRY_S = 0.05


async def until_port_open(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        await asyncio.sleep(RETRY_S)


async def until_grpc_serving(host: str, port: int, connector: Connector) -> None:
    """Until the standard health service says SERVING for the whole server. CommandError when it cannot say so."""
    await until_port_open(host, port)  # a channel that found nobody waits longer before it tries again
    async with connector.open(f"{host}:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for reply in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise CommandError(f"{host}:{port} has no health service: {error.details()}") from None
            await asyncio.sleep(RETRY_S)


async def until_http_ready(url: str) -> None:
    """Until GET `url` answers 200."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(RETRY_S)
