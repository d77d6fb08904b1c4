"""Turns configured `host:port` into the addresses of single workers, again and again.

A host name may stand for several (a headless service); each of its addresses is a worker.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain

from gateway.config import split_address
from gateway.placement import Role

log = logging.getLogger("twostroke.discovery")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Every IP address of `host`, of one family so that no worker is met twice: IPv4 where there is any.

    Raises OSError (socket.gaierror) when the name cannot be resolved.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())


class Discovery:
    """Keeps the last known addresses of a name that cannot be resolved now."""

    def __init__(
        self,
        configured: Mapping[Role, Sequence[str]],
        on_addresses: Callable[[Role, Sequence[str]], None],
        interval_s: float,
        *,
        resolve: Resolve = resolve,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._configured = configured
        self._on_addresses = on_addresses
        self._interval_s = interval_s
        self._resolve = resolve
        self._sleep = sleep
        self._known: dict[str, list[str]] = {}
        self._unresolved: dict[str, str] = {}

    def unresolved(self) -> list[str]:
        """One line for each name that could not be resolved at the last try."""
        return list(self._unresolved.values())

    async def run(self) -> None:
        """Looks up every name, at once and then in every interval, until cancelled."""
        while True:
            await self.look_up()
            await self._sleep(self._interval_s)

    async def look_up(self) -> None:
        for role, names in self._configured.items():
            found = await asyncio.gather(*map(self._addresses, names))
            self._on_addresses(role, list(dict.fromkeys(chain.from_iterable(found))))

    async def _addresses(self, name: str) -> list[str]:
        host, port = split_address(name)
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            reason = f"{name}: the host name cannot be resolved ({error.strerror or error})"
            if self._unresolved.get(name) != reason:
                log.warning("%s", reason)
            self._unresolved[name] = reason
            return self._known.get(name, [])
        self._unresolved.pop(name, None)
        self._known[name] = [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in found]
        return self._known[name]
