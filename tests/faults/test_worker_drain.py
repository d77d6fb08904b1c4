"""SIGTERM to a worker of a whole stack in mid-stream: the stream ends whole, then the worker, with code 0."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.stack_process import StackProcess, stack_process
from tests.support.tiny_models import make_tiny_model

NUM_TOKENS = 900


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
