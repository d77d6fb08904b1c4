"""Names become addresses; what cannot be resolved keeps its last addresses."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from gateway import discovery
from gateway.discovery import Discovery
from gateway.placement import Role


class Names:
    """A resolver with a table, which tests change."""

    def __init__(self, **table: list[str]) -> None:
        self.table = table

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if host not in self.table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.table[host]


def make(names: Names, told: dict[Role, Sequence[str]], *decode: str) -> Discovery:
    configured = {Role.PREFILL: ("pre:1",), Role.DECODE: decode}
    return Discovery(configured, told.__setitem__, 5.0, resolve=names)


async def test_a_name_stands_for_several_workers() -> None:
    told: dict[Role, Sequence[str]] = {}
    names = Names(pre=["10.0.0.1", "10.0.0.2"], dec=["10.0.1.1", "fd00::1"], again=["10.0.1.1"])
    await make(names, told, "dec:7", "again:7").look_up()
    assert told == {
        Role.PREFILL: ["10.0.0.1:1", "10.0.0.2:1"],
        Role.DECODE: ["10.0.1.1:7", "[fd00::1]:7"],
    }


async def test_the_last_known_addresses_stay(caplog: pytest.LogCaptureFixture) -> None:
    told: dict[Role, Sequence[str]] = {}
    names = Names(pre=["10.0.0.1"])
    lookups = make(names, told)
    await lookups.look_up()
    del names.table["pre"]
    await lookups.look_up()
    await lookups.look_up()
    assert told[Role.PREFILL] == ["10.0.0.1:1"]
    assert lookups.unresolved() == ["pre:1: the host name cannot be resolved (Name or service not known)"]
    assert len(caplog.records) == 1
    names.table["pre"] = []
    await lookups.look_up()
    assert told[Role.PREFILL] == []
    assert lookups.unresolved() == []


async def test_looks_again_in_every_interval() -> None:
    told: dict[Role, Sequence[str]] = {}
    names = Names(pre=["10.0.0.1"])
    slept: list[float] = []
    third = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        names.table["pre"] = [f"10.0.0.{len(slept) + 1}"]
        if len(slept) == 3:
            third.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(
        Discovery({Role.PREFILL: ("pre:1",)}, told.__setitem__, 5.0, resolve=names, sleep=sleep).run()
    )
    await third.wait()
    running.cancel()
    await asyncio.wait({running})
    assert told[Role.PREFILL] == ["10.0.0.3:1"]
    assert slept == [5.0] * 3


async def test_the_real_resolver() -> None:
    assert await discovery.resolve("127.0.0.1", 80) == ["127.0.0.1"]
