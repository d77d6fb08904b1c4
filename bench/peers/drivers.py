"""A process of another environment that does works: one line of JSON in, one out; and the process under a server.

out: ready
in:  {"concurrency": 1, "num_requests": 4, "num_input_tokens": 128, "num_output_tokens": 64, "seed": 7}
out: {"median_ttft_ms": .., "median_tpot_ms": .., "output_throughput": .., "completed": 4, "total_output_tokens": 256}
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.environments import last_lines
from bench.peers.work import Figures

START_TIMEOUT_S = 1800.0  # vLLM compiles at its first start
GRACE_S = 20.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


class EngineFailed(Exception):
    """An engine did not start, died, or did not do its work. `str` says what and how its log ends."""


class WorkFailed(Exception):
    """A work whose figures do not count, since not all of it was done; the engine may be given the next one."""


@dataclass(frozen=True, slots=True)
class Command:
    """`of_checkout`: runs Twostroke's own modules. Others see none of them: `kernels` is a package elsewhere too."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    of_checkout: bool = False


class Process:
    """A child in its own process group; its log is a file. `stop` ends the whole group."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        self.name, self._log = name, log
        inherited = {key: held for key, held in os.environ.items() if command.of_checkout or key != "PYTHONPATH"}
        with log.open("wb") as sink:
            self.popen = subprocess.Popen(  # noqa: S603  (the command is ours)
                command.argv,
                env={**inherited, **OFFLINE, **command.environment},
                cwd=None if command.of_checkout else log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if name.endswith("driver") else sink,
                stderr=sink,
                start_new_session=True,
            )

    def failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"{self.name} {what}: {last_lines(self._log.read_text(errors='replace'))}")

    def check_alive(self) -> None:
        if self.popen.poll() is not None:
            raise self.failure(f"ended with {self.popen.returncode}")

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the group is killed below
                self.popen.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was still to read
                    pipe.close()


class Driver:
    """Precondition of `run`: one at a time."""

    def __init__(self, command: Command, log: Path) -> None:
        self._process = Process("driver", command, log)
        self._buffer = b""

    def wait_ready(self) -> None:
        line = self._line(START_TIMEOUT_S)
        while line != b"ready":  # libraries may greet first
            line = self._line(START_TIMEOUT_S)

    def run(self, job: Mapping[str, object], timeout_s: float) -> Figures:
        """Raises WorkFailed, or EngineFailed: the driver must then be stopped."""
        assert self._process.popen.stdin is not None
        try:
            self._process.popen.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.popen.stdin.flush()
        except BrokenPipeError:
            raise self._process.failure("has ended") from None
        return figures_of(json.loads(self._line(timeout_s)), job)

    def stop(self) -> None:
        self._process.stop()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.popen.stdout is not None
        deadline, descriptor = time.monotonic() + timeout_s, self._process.popen.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._process.failure(f"said nothing for {timeout_s:.0f} s")
            received = os.read(descriptor, 65_536)
            if not received:
                raise self._process.failure("has ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.strip()


def figures_of(result: Mapping[str, Any], job: Mapping[str, Any]) -> Figures:
    """Raises WorkFailed unless every request completed, with as many tokens as were asked for."""
    num_requests, num_tokens = job["num_requests"], job["num_requests"] * job["num_output_tokens"]
    if result["completed"] != num_requests:
        raise WorkFailed(f"only {result['completed']} of {num_requests} requests completed")
    if result["total_output_tokens"] != num_tokens:
        raise WorkFailed(f"{result['total_output_tokens']} output tokens came where {num_tokens} were asked for")
    return Figures(
        ttft_ms=float(result["median_ttft_ms"]),
        tpot_ms=float(result["median_tpot_ms"]),
        output_tokens_per_s=float(result["output_throughput"]),
    )
