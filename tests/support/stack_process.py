"""A whole local stack as its user starts it: `twostroke up` in a process of its own, spoken to over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.telemetry.span_file import SpanRecord, read_spans

STATUS_LAG_S = 0.4
"""Eight times the interval in which workers tell the gateway of a change."""


@dataclass
class StackProcess:
    url: str
    state_dir: Path
    process: "subprocess.Popen[str]"
    client: httpx.Client
    num_blocks: dict[str, float] = field(default_factory=dict)  # free blocks of each worker before the first request

    def complete(self, prompt: Any, headers: dict[str, str] | None = None, **parameters: Any) -> dict[str, Any]:
        """One completion, not streamed; the body, whatever the status."""
        model = self.client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": prompt, **parameters}
        response = self.client.post("/v1/completions", json=body, headers=headers)
        return {"status": response.status_code, "headers": response.headers, **response.json()}

    def workers(self) -> dict[str, dict[str, float]]:
        """worker -> field of its status -> value, as /metrics shows them."""
        found: dict[str, dict[str, float]] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("twostroke_worker_"):
                name, rest = line.removeprefix("twostroke_worker_").split("{", 1)
                labels, value = rest.rsplit("} ", 1)
                worker = next(part for part in labels.split(",") if part.startswith("worker=")).split('"')[1]
                found.setdefault(worker, {})[name.removesuffix("_total")] = float(value)
        return found

    def await_idle(self) -> None:
        """Returns when every worker says that it runs nothing and holds nothing; the test's time-out is the limit.

        The gateway shows statuses that are a little old, and an idle one may be of before the last request: what
        counts is that they are idle and have stayed the same for a while.
        """
        before: dict[str, dict[str, float]] = {}
        same_since_s = time.monotonic()
        while True:
            loads = self.workers()
            is_idle = all(w["num_running"] == w["num_waiting"] == w["reserved_blocks"] == 0 for w in loads.values())
            if not is_idle or loads != before:
                same_since_s = time.monotonic()
            elif time.monotonic() - same_since_s > STATUS_LAG_S:
                return
            before = loads

    def spans(self, trace_id: str) -> list[SpanRecord]:
        return [span for span in read_spans(self.state_dir / "spans") if span.trace_id == trace_id]

    def log(self, service: str) -> str:
        return next(self.state_dir.glob(f"run-*/{service}.log")).read_text()


@contextmanager
def stack_process(state_dir: Path, topology: str, model: str, *arguments: str) -> Iterator[StackProcess]:
    """Runs until the block ends, then SIGINT; the exit code must be 0 unless the stack died in the test."""
    port = free_port()
    command = [sys.executable, "-m", "cli", "up", "--topology", topology, "--port", str(port), "--model", model]
    process = subprocess.Popen(
        [*command, "--kv-memory-mib", "64", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TWOSTROKE_STATE_DIR": str(state_dir), "OMP_NUM_THREADS": "2", "OTEL_SDK_DISABLED": "false"},
    )
    try:
        read_until(process, "Serving on")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            running = StackProcess(f"http://127.0.0.1:{port}", state_dir, process, client)
            running.num_blocks = {worker: load["free_blocks"] for worker, load in running.workers().items()}
            yield running
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        if process.stdout is not None:
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_until(process: "subprocess.Popen[str]", marker: str) -> None:
    """Up to the line of its output that has `marker`."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if marker in line:
            return
    raise AssertionError(f"the stack ended before it said {marker!r}:\n{''.join(seen)}")
