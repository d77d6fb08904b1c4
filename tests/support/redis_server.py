"""Servers that speak Redis's protocol, as processes: the real one, and the embedded one."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REDIS_SERVER = "redis-server"
START_TIMEOUT_S = 30.0


class RedisServer:
    """A `redis-server` without persistence on a port of its own. It can be killed and started again there."""

    def __init__(self, folder: Path, *options: str) -> None:
        executable = shutil.which(REDIS_SERVER)
        if executable is None:
            pytest.fail(f"{REDIS_SERVER} is not installed; install it (Debian: apt-get install redis-server)")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            executable,
            *("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(folder), *options),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it accepts connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for_line(self._process, "Ready to accept connections")

    def kill(self) -> None:
        """Without a goodbye, and without its data."""
        if self._process is not None:
            self._process.kill()
            end(self._process)
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running_embedded_index() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """(url, process) of `python -m common.prefix_index.embedded`."""
    command = [sys.executable, "-m", "common.prefix_index.embedded", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = wait_for_line(process, "listens")
        match = re.search(r"port=(\d+)", line)
        assert match, line
        yield f"redis://127.0.0.1:{match[1]}/0", process
    finally:
        process.kill()
        end(process)


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> str:
    """The first line of the process's output with `text` in it; fails with all of the output when it ends first."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    pytest.fail(f"{process.args!r} ended before it said {text!r}:\n{''.join(seen)}")


def end(process: "subprocess.Popen[str]") -> int:
    """Its exit code; closes the pipe, which would be a warning otherwise."""
    code = process.wait(timeout=START_TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()
    return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
