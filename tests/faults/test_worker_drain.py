"""Draining workers: what was promised and what streams goes on to its end, then the worker ends, with code 0."""

import asyncio
import json
import os
import signal
from pathlib import Path

import grpc
import pytest

from common.errors import Draining
from common.ids import mint_transfer_id
from common.rpc.status import rpc_error_to_exception
from common.sampling import SamplingParams
from tests.support.stack_process import StackProcess, stack_process
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_pair import worker_pair

NUM_TOKENS = 900
PROMPT = list(range(1, 20))
PARAMS = SamplingParams(seed=3, max_tokens=12)


def worker_pid(running: StackProcess, package: str) -> int:
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return next(int(child) for child in children if package in Path(f"/proc/{child}/cmdline").read_text())


@pytest.mark.parametrize(("package", "service"), [("decode_svc", "decode-0"), ("prefill_svc", "prefill-0")])
def test_what_streams_goes_on_to_its_end(package: str, service: str, tmp_path: Path) -> None:
    tiny = str(make_tiny_model(tmp_path / "tiny", "llama"))
    with stack_process(tmp_path / "state", "1p1d", tiny, "--no-speculation", "--no-restart") as running:
        model = running.client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "a", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            events = [next(lines)]
            os.kill(worker_pid(running, package), signal.SIGTERM)
            events.extend(lines)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["usage"]["completion_tokens"] == NUM_TOKENS
        output, _ = running.process.communicate(timeout=60)
        assert running.process.returncode == 1, "a stack without one of its services stops"
        assert f"{service} exited with code 0" in output


async def test_a_reservation_is_kept_by_a_decode_worker_that_drains() -> None:
    async with worker_pair() as pair:
        expected = await pair.answer(PROMPT, PARAMS)
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        draining = asyncio.create_task(pair.decode_servicer.drain())
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # answered after the drain has begun
            await pair.reserve(PROMPT, mint_transfer_id())
        assert isinstance(rpc_error_to_exception(caught.value, "decode"), Draining)
        decoding = pair.generate(PROMPT, PARAMS, transfer_id, ticket)
        [first, _] = [event async for event in pair.run_prefill(PROMPT, PARAMS, transfer_id, ticket)]
        rest = [token.token_id async for event in decoding for token in event.tokens]
        assert [first.first_token.token.token_id, *rest] == expected
        await draining


async def test_a_drain_waits_for_a_reservation_until_its_lease_ends() -> None:
    async with worker_pair() as pair:
        await pair.reserve(PROMPT, mint_transfer_id())
        draining = asyncio.create_task(pair.decode_servicer.drain())
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.reserve(PROMPT, mint_transfer_id())
        assert not draining.done()
        pair.receiver_clock.now_s += 31.0
        assert pair.receiver.expire() == 1
        await draining
