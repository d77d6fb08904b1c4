"""Every worker of a stack, drained and started again one after the other under load: no request notices."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.__main__ import main
from tests.support.certificates import authority
from tests.support.stack_process import StackProcess, read_until, stack_process
from tests.support.tiny_models import make_tiny_model

WORKERS = ("prefill-0", "decode-0", "prefill-1", "decode-1")
NUM_CLIENTS = 2
PROMPTS = [f"{number} turns of the crank, " * 6 for number in range(4)]
PARAMETERS = {"max_tokens": 32, "temperature": 0.9, "seed": 11, "ignore_eos": True, "logprobs": 1}


def answer(running: StackProcess, prompt: str) -> Any:
    body = running.complete(prompt, **PARAMETERS)
    assert body["status"] == 200, body
    return body["choices"]


def incarnations(running: StackProcess) -> dict[str, str]:
    """Of the workers that are ready."""
    listed = running.client.get("/operations/workers").json()["workers"]
    return {worker["id"]: worker["incarnation"] for worker in listed if worker["state"] == "ready"}


@contextmanager
def load(running: StackProcess, expected: dict[str, Any]) -> Iterator[list[int]]:
    """Clients that ask without a pause and compare each answer. Yields how many were right, client by client."""
    is_over = threading.Event()
    num_right = [0] * NUM_CLIENTS

    def ask(client: int) -> None:
        with httpx.Client(base_url=running.url, timeout=60) as own_connections:
            stack = replace(running, client=own_connections)
            for prompt in itertools.cycle(PROMPTS[client:] + PROMPTS[:client]):
                if is_over.is_set():
                    return
                assert answer(stack, prompt) == expected[prompt]
                num_right[client] += 1

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask, client) for client in range(NUM_CLIENTS)]
        try:
            yield num_right
        finally:
            is_over.set()
        for client in clients:
            client.result()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_worker_restarts_under_load_and_every_answer_is_the_same(tmp_path: Path) -> None:
    """Under mutual TLS, and with the numeric path that is exact: equality is to the bit."""
    tiny = str(make_tiny_model(tmp_path / "tiny", "llama"))
    tls_dir = str(authority("ours").issue(tmp_path / "tls"))
    with stack_process(tmp_path / "state", "2p2d", tiny, "--numerics", "int8", "--tls-dir", tls_dir) as running:
        expected = {prompt: answer(running, prompt) for prompt in PROMPTS}
        before = incarnations(running)
        assert before.keys() == set(WORKERS)
        with load(running, expected) as num_right:
            for worker in WORKERS:
                num_before = sum(num_right)
                assert main(["drain", worker, "--url", running.url]) == 0
                read_until(running.process, f"{worker} is ready again")
                while incarnations(running).get(worker, before[worker]) == before[worker]:
                    pass  # the gateway meets it within moments; the test's time-out is the limit
                assert sum(num_right) > num_before, "requests went on meanwhile"
        after = incarnations(running)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values()), "each is another process"
        running.await_idle()
        for worker, status in running.workers().items():
            assert status["free_blocks"] == running.num_blocks[worker], f"{worker} leaked blocks"
    for worker in WORKERS:
        assert "asked to drain" in running.log(worker)
        assert "not drained" not in running.log(worker)
