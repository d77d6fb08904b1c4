"""`make chaos ARGS=--network`: gateway, prefill and decode on hosts of their own; links break, crawl and heal.

Three network namespaces with a link between each two:

    gateway ──── prefill
        └── decode ──┘

The prefill host reaches decode at the address that the gateway uses, over the link between them.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.chaos.cases import make_cases
from tests.chaos.folder import run_in_folder
from tests.chaos.harness import GATEWAY_FLAGS, answers_without_faults, environment, leaked_blocks
from tests.chaos.load import Limits, Load, Totals
from tests.chaos.options import parse
from tests.chaos.stack import ChaosStack, NetworkHost, Plan, worker_loads
from tests.support.tiny_models import make_tiny_model

HEALTHY_S = 4.0
BROKEN_S = 10.0
NUM_CLIENTS = 8


class NotPermitted(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True)
class Topology:
    """Names of namespaces; links are named by the interface on their first host."""

    gateway: str
    prefill: str
    decode: str

    @property
    def links(self) -> dict[str, tuple[str, str]]:
        """link -> (namespace, interface) of one of its ends."""
        return {
            "gateway-prefill": (self.gateway, "to-prefill"),
            "gateway-decode": (self.gateway, "to-decode"),
            "prefill-decode": (self.prefill, "to-decode"),
        }


PREFILL_ADDRESS, DECODE_ADDRESS = "10.77.1.2", "10.77.2.2"


@contextmanager
def namespaces() -> Iterator[Topology]:
    """Raises NotPermitted. Nothing is left afterwards."""
    topology = Topology(*(f"twostroke-{name}-{os.getpid()}" for name in ("gateway", "prefill", "decode")))
    made: list[str] = []
    try:
        for name in (topology.gateway, topology.prefill, topology.decode):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _link(topology.gateway, "to-prefill", "10.77.1.1", topology.prefill, "to-gateway", PREFILL_ADDRESS)
        _link(topology.gateway, "to-decode", "10.77.2.1", topology.decode, "to-gateway", DECODE_ADDRESS)
        _link(topology.prefill, "to-decode", "10.77.3.1", topology.decode, "to-prefill", "10.77.3.2")
        _ip("-n", topology.prefill, "route", "add", f"{DECODE_ADDRESS}/32", "via", "10.77.3.2")
        yield topology
    finally:
        for name in made:
            _ip("netns", "del", name)


def _link(a: str, a_name: str, a_address: str, b: str, b_name: str, b_address: str) -> None:
    _ip("-n", a, "link", "add", a_name, "type", "veth", "peer", "name", b_name, "netns", b)
    for host, name, address in ((a, a_name, a_address), (b, b_name, b_address)):
        _ip("-n", host, "address", "add", f"{address}/30", "dev", name)
        _ip("-n", host, "link", "set", name, "up")


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotPermitted("there is no `ip` (Debian: apt-get install iproute2)") from None
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


class Links:
    """Breaks, slows and heals the links of a topology."""

    def __init__(self, topology: Topology) -> None:
        self._ends = topology.links
        self._topology = topology
        self.slow_by = self._find_slow()  # how a link is made slow here; empty: it cannot

    def partition(self, link: str) -> None:
        """Packets vanish; no one is told."""
        namespace, interface = self._ends[link]
        _ip("-n", namespace, "link", "set", interface, "down")

    def heal(self, link: str) -> None:
        namespace, interface = self._ends[link]
        _ip("-n", namespace, "link", "set", interface, "up")
        self._tc(namespace, "qdisc", "del", "dev", interface, "root")
        if link == "prefill-decode":  # a route goes with its interface
            _ip("-n", namespace, "route", "replace", f"{DECODE_ADDRESS}/32", "via", "10.77.3.2")

    def slow(self, link: str) -> None:
        namespace, interface = self._ends[link]
        assert self._tc(namespace, "qdisc", "replace", "dev", interface, "root", *self.slow_by.split())

    def _find_slow(self) -> str:
        """Loss and delay by netem; where the kernel has none, a narrow link with a short queue: it delays what waits
        and drops what does not fit."""
        for how in ("netem delay 60ms 20ms loss 3%", "tbf rate 1mbit burst 4kb limit 12kb"):
            if self._tc(self._topology.gateway, "qdisc", "replace", "dev", "to-decode", "root", *how.split()):
                self.heal("gateway-decode")
                return how
        return ""

    def _tc(self, namespace: str, *arguments: str) -> bool:
        return subprocess.run(["tc", "-n", namespace, *arguments], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Phase:
    name: str
    totals: Totals
    leaked: dict[str, float]
    ready_again_s: float  # after the healing, until every worker is

    @property
    def is_well(self) -> bool:
        return not (self.totals.wrong or self.totals.hangs or self.leaked)


async def run_phases(topology: Topology, options: argparse.Namespace, work_dir: Path) -> list[Phase]:
    limits = Limits(options.deadline_s, options.hang_s)
    model = make_tiny_model(work_dir / "tiny", "llama")
    cases = make_cases(options.seed, 40)
    print(f"network: logs in {work_dir}; computing {len(cases)} answers without faults", flush=True)
    expected = await answers_without_faults(model, work_dir, cases, limits)
    plan = Plan(
        model,
        work_dir / "network",
        1,
        1,
        environment(work_dir),
        has_redis=False,
        gateway_flags=GATEWAY_FLAGS,
        hosts={
            "prefill": NetworkHost(topology.prefill, PREFILL_ADDRESS),
            "decode": NetworkHost(topology.decode, DECODE_ADDRESS),
        },
    )
    phases: list[Phase] = []
    links = Links(topology)
    ways = [("cut", links.partition)]
    if links.slow_by:
        ways.append((f"slow ({links.slow_by})", links.slow))
    else:
        print("network: slow links: skipped, this kernel has neither netem nor tbf")
    async with ChaosStack(plan) as stack:
        async with httpx.AsyncClient(base_url=stack.url) as client:
            start = {worker: load["free_blocks"] for worker, load in (await worker_loads(client)).items()}
        for link in topology.links:
            for what, change in ways:
                load = Load(stack.url, cases, expected, limits, options.seed)
                ready_again_s = await _break_and_heal(links, link, change, load, stack)
                leaked = await leaked_blocks(stack, start)
                phases.append(Phase(f"{link} {what}", load.totals, leaked, ready_again_s))
                print(describe(phases[-1]), flush=True)
                await load.close()
    return phases


async def _break_and_heal(
    links: Links, link: str, change: Callable[[str], None], load: Load, stack: ChaosStack
) -> float:
    """Load all the while: healthy, broken, healed. Returns how long after the healing every worker was ready."""
    until_s = time.monotonic() + HEALTHY_S + BROKEN_S + HEALTHY_S
    loading = asyncio.create_task(load.run(NUM_CLIENTS, lambda _: time.monotonic() < until_s))
    await asyncio.sleep(HEALTHY_S)
    change(link)
    await asyncio.sleep(BROKEN_S)
    links.heal(link)
    healed_s = time.monotonic()
    await stack.until_ready()
    ready_again_s = time.monotonic() - healed_s
    await loading
    return ready_again_s


def describe(phase: Phase) -> str:
    totals = phase.totals
    failed = ", ".join(f"{name}: {count}" for name, count in totals.failed.most_common()) or "none"
    longest = max(totals.durations_s, default=0.0)
    return (
        f"{phase.name}: {totals.requests} requests, {totals.right} right, {len(totals.wrong)} wrong, "
        f"{len(totals.hangs)} hangs, {int(sum(phase.leaked.values()))} blocks leaked, failed {failed}, "
        f"refused and sent again {sum(totals.refused.values())}; longest {longest:.1f} s; "
        f"ready {phase.ready_again_s:.1f} s after healing"
    )


def main_outside(arguments: list[str]) -> int:
    """Makes the hosts, then runs this module on the gateway's."""
    try:
        with namespaces() as topology:
            names = json.dumps([topology.gateway, topology.prefill, topology.decode])
            command = [sys.executable, "-m", "tests.chaos.network", names, *arguments]
            return subprocess.run(["ip", "netns", "exec", topology.gateway, *command], check=False).returncode
    except NotPermitted as reason:
        print(f"chaos --network: skipped, network namespaces are not to be had here: {reason}")
        return 0


def report(options: argparse.Namespace, topology: Topology, work_dir: Path) -> bool:
    """On the gateway's host."""
    phases = asyncio.run(run_phases(topology, options, work_dir))
    if options.out is not None:
        rows = [
            {"phase": p.name, "requests": p.totals.requests, "right": p.totals.right, "wrong": p.totals.wrong}
            | {"hangs": p.totals.hangs, "leaked": p.leaked, "failed": p.totals.failed, "refused": p.totals.refused}
            | {"ready_again_s": round(p.ready_again_s, 1), "longest_s": max(p.totals.durations_s, default=0.0)}
            for p in phases
        ]
        options.out.write_text(json.dumps(rows, indent=2) + "\n")
    return bool(phases) and all(phase.is_well for phase in phases)


def main_inside(arguments: list[str]) -> int:
    """`arguments`: the names of the namespaces, then those of `make chaos`."""
    topology = Topology(*json.loads(arguments[0]))
    return run_in_folder("network", lambda work_dir: report(parse(arguments[1:]), topology, work_dir))


if __name__ == "__main__":
    sys.exit(main_inside(sys.argv[1:]))
