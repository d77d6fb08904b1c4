"""A stack of real processes that die and come back: each service is restarted at its port whenever it ends."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cli.child import Child
from common.faults.injector import INJECTED
from tests.support.redis_server import free_port

LOOPBACK = "127.0.0.1"
RESTART_DELAY_S = 0.2
START_TIMEOUT_S = 400.0
"""A first start in a new checkout compiles the kernels."""
DEFECT_MARKS = ("unexpected error in", " CRITICAL ", "AssertionError", "will not be tried again", "was never retrieved")


@dataclass(frozen=True)
class Plan:
    """What runs, and with which flags."""

    model: Path
    work_dir: Path
    num_prefill: int
    num_decode: int
    environment: Mapping[str, str]
    faults: Mapping[str, str] = field(default_factory=dict)  # role -> plan of faults
    kv_memory_mib: int = 1
    has_redis: bool = True
    gateway_flags: Sequence[str] = ()
    hosts: Mapping[str, "NetworkHost"] = field(default_factory=dict)  # role -> where it runs; default: here


@dataclass(frozen=True)
class NetworkHost:
    """A network namespace, and the address at which the others reach it."""

    namespace: str
    address: str

    def command(self, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv]


@dataclass
class Service:
    name: str
    role: str
    argv: list[str]
    child: Child | None = None
    num_starts: int = 0
    task: "asyncio.Task[None] | None" = None
    exits: Counter[int] = field(default_factory=Counter)


class ChaosStack:
    """Use as an async context manager; ready when entered."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.services = {service.name: service for service in _services(plan, self.port)}
        self._is_closing = False

    async def __aenter__(self) -> "ChaosStack":
        self._plan.work_dir.mkdir(parents=True, exist_ok=True)
        for service in self.services.values():
            service.task = asyncio.create_task(self._keep(service))
        await self.until_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closing = True
        for service in self.services.values():
            if service.child is not None:
                service.child.kill_group()
        await asyncio.gather(*(service.task for service in self.services.values() if service.task))

    async def until_ready(self) -> None:
        """Every worker is ready, and the gateway says so."""
        until_s = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(base_url=self.url) as client:
            while time.monotonic() < until_s:
                try:
                    if len(await worker_loads(client)) == self._plan.num_prefill + self._plan.num_decode:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise AssertionError(f"not every worker is ready after {START_TIMEOUT_S:g} s; logs in {self._plan.work_dir}")

    def kill(self, name: str) -> None:
        """SIGKILL; the service comes back by itself."""
        self._signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def pid(self, name: str) -> int:
        child = self.services[name].child
        assert child is not None
        return child.pid

    def injected(self) -> Counter[str]:
        """`point kind` -> how often, as the logs tell."""
        counts: Counter[str] = Counter()
        for line in self._log_lines():
            if INJECTED in line:
                values = dict(word.split("=", 1) for word in line.split() if "=" in word)
                counts[f"{values['point']} {values['kind']}"] += 1
        return counts

    def defects(self) -> list[str]:
        """Lines of the logs that no failure of a peer may cause, and exits that nobody asked for."""
        lines = [line for line in self._log_lines() if any(mark in line for mark in DEFECT_MARKS)]
        for service in self.services.values():
            lines += [f"{service.name} ended with {code}" for code in service.exits if code != -signal.SIGKILL]
        return lines

    def _log_lines(self) -> list[str]:
        return [
            line
            for path in sorted(self._plan.work_dir.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
        ]

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self.services[name].child
        if child is not None and child.returncode is None:
            os.kill(child.pid, number)

    async def _keep(self, service: Service) -> None:
        while not self._is_closing:
            service.num_starts += 1
            log = self._plan.work_dir / f"{service.name}.{service.num_starts}.log"
            service.child = await Child.start(service.name, _argv(self._plan, service), self._plan.environment, log)
            code = await service.child.wait()
            if not self._is_closing:
                service.exits[code] += 1
                await asyncio.sleep(RESTART_DELAY_S)


async def worker_loads(client: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """worker -> field of its status -> value, of the workers that are ready."""
    found: dict[str, dict[str, float]] = {}
    for line in (await client.get("/metrics", timeout=10)).text.splitlines():
        if line.startswith("twostroke_worker_"):
            name, rest = line.removeprefix("twostroke_worker_").split("{", 1)
            labels, value = rest.rsplit("} ", 1)
            worker = next(part for part in labels.split(",") if part.startswith("worker=")).split('"')[1]
            found.setdefault(worker, {})[name.removesuffix("_total")] = float(value)
    return {worker: load for worker, load in found.items() if "free_blocks" in load}


def _services(plan: Plan, gateway_port: int) -> list[Service]:
    redis_port = free_port()
    redis_url = f"redis://{LOOPBACK}:{redis_port}/0"
    index = ["--redis-url", redis_url] if plan.has_redis else []
    services: list[Service] = []
    if plan.has_redis:
        services.append(Service("redis", "redis", _redis_argv(redis_port)))
    addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
    for role, count in (("decode", plan.num_decode), ("prefill", plan.num_prefill)):
        for number in range(count):
            port = free_port()
            host = plan.hosts.get(role)
            addresses[role].append(f"{host.address if host else LOOPBACK}:{port}")
            services.append(Service(f"{role}-{number}", role, _worker_argv(plan, role, number, port) + index))
    gateway = [sys.executable, "-m", "gateway", "--port", str(gateway_port), *index, *plan.gateway_flags]
    for role, listed in addresses.items():
        if listed:
            gateway += [f"--{role}", ",".join(listed)]
    services.append(Service("gateway", "gateway", gateway))
    return services


def _redis_argv(port: int) -> list[str]:
    executable = shutil.which("redis-server")
    assert executable is not None, "redis-server is not installed (Debian: apt-get install redis-server)"
    return [executable, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]


def _worker_argv(plan: Plan, role: str, number: int, port: int) -> list[str]:
    argv = [sys.executable, "-m", f"{role}_svc", "--port", str(port), "--worker-id", f"{role}-{number}"]
    argv += ["--model", str(plan.model), "--numerics", "int8", "--kv-memory-mib", str(plan.kv_memory_mib)]
    argv += ["--threads", "1", "--max-num-batched-tokens", "64"]
    if role == "decode":
        argv += ["--lease-s", "5"]
    if role in plan.hosts:
        argv += ["--host", plan.hosts[role].address, "--allow-unencrypted"]
    return argv


def _argv(plan: Plan, service: Service) -> list[str]:
    """Every start draws other faults than the one before, or the fault that ended it would come again at once."""
    argv = service.argv
    faults = plan.faults.get(service.role)
    if faults:
        seed = sum(map(ord, service.name)) * 1000 + service.num_starts
        argv = [*argv, "--allow-fault-injection", "--faults", f"{faults};seed={seed}"]
    host = plan.hosts.get(service.role)
    return host.command(argv) if host else argv
