"""The gateway as a process, over fake workers: start, readiness, streams, drain, and what stands in its way."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from common.tokenizer_files import tokenizer_digest
from tests.support.fake_worker import FakeWorker, hang
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.tiny_tokenizers import byte_level, meta_json

PATIENCE_S = 60.0
STREAM = {"model": "fake-model", "prompt": "one two three", "max_tokens": 8, "seed": 3, "stream": True}


@asynccontextmanager
async def workers() -> AsyncIterator[tuple[FakePrefill, FakeDecode]]:
    prefill, decode = FakePrefill("p0"), FakeDecode("d0")
    for fake in (prefill, decode):
        fake.tokenizer_files = {"tokenizer.json": byte_level().to_str().encode(), "tokenizer_meta.json": meta_json()}
        fake.announced_digest = tokenizer_digest(fake.tokenizer_files)
        await fake.start()
    try:
        yield prefill, decode
        for fake in (prefill, decode):
            fake.check_integrity()
    finally:
        await asyncio.gather(prefill.stop(), decode.stop())


class GatewayProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""

    async def until_logged(self, text: str) -> str:
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            async for line in self.process.stderr:
                self.log.append(line.decode())
                if text in self.log[-1]:
                    return self.log[-1]
        raise AssertionError(f"{text!r} was not logged:\n{''.join(self.log)}")

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            assert self.process.stderr is not None
            self.log.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@asynccontextmanager
async def gateway(folder: Path, *flags: str) -> AsyncIterator[GatewayProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TWOSTROKE_STATE_DIR": str(folder)},
    )
    try:
        yield GatewayProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def ready_gateway(folder: Path, prefill: FakeWorker, decode: FakeWorker) -> AsyncIterator[GatewayProcess]:
    async with gateway(folder, "--port", "0", "--prefill", prefill.address, "--decode", decode.address) as running:
        line = await running.until_logged(" ready url=")
        running.url = line.split("url=")[1].split()[0]
        yield running


def http(running: GatewayProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, trust_env=False)


async def test_serves_and_drains(tmp_path: Path) -> None:
    """SIGTERM in the middle of a stream: not ready, new requests 503, the stream ends whole, exit 0."""
    async with workers() as (prefill, decode), ready_gateway(tmp_path, prefill, decode) as running:
        gate = asyncio.Event()
        decode.points.actions["token4"] = lambda: asyncio.wait_for(gate.wait(), PATIENCE_S)
        async with http(running) as client:
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            async with client.stream("POST", "/v1/completions", json=STREAM) as response:
                assert response.status_code == 200
                assert response.headers["x-twostroke-prefill-worker"] == "p0"
                await decode.points.reached("token4")
                running.process.send_signal(signal.SIGTERM)
                await running.until_logged("draining")
                refused = await client.post("/v1/completions", json=STREAM)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "draining"
                unready = await client.get("/readyz")
                assert (unready.status_code, unready.json()["reason"]) == (503, "the gateway is shutting down")
                gate.set()
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert await running.ended() == 0, "".join(running.log)


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    async with workers() as (prefill, decode), ready_gateway(tmp_path, prefill, decode) as running:
        decode.points.actions["token4"] = hang
        async with http(running) as client, client.stream("POST", "/v1/completions", json=STREAM):
            await decode.points.reached("token4")
            running.process.send_signal(signal.SIGTERM)
            await running.until_logged("draining")
            running.process.send_signal(signal.SIGINT)
            assert await running.ended() == 0
        await decode.points.reached("release")


async def test_a_client_that_leaves_releases_both_sides(tmp_path: Path) -> None:
    async with workers() as (prefill, decode), ready_gateway(tmp_path, prefill, decode) as running:
        decode.points.actions["token4"] = hang
        async with http(running) as client, client.stream("POST", "/v1/completions", json=STREAM) as response:
            assert response.status_code == 200
            await decode.points.reached("token4")
        async with asyncio.timeout(PATIENCE_S):
            await decode.points.reached("release")
            await prefill.points.reached("release")


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with gateway(tmp_path, "--port", str(port)) as running:
            assert await running.ended() == 1
    [line] = "".join(running.log).splitlines()
    assert f"port {port} on 127.0.0.1 is in use" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--decode", "nowhere"], "'nowhere' is not host:port"), (["--server-secret-file", "/does/not/exist"], "exist")],
)
async def test_a_wrong_setting_is_named(tmp_path: Path, flags: list[str], named: str) -> None:
    async with gateway(tmp_path, "--port", "0", *flags) as running:
        assert await running.ended() != 0
    assert named in "".join(running.log)
