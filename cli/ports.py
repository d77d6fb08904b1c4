"""TCP ports of this machine: whether the wanted one is free, and free ones for services that nobody names."""

import contextlib
import errno
import socket
from collections.abc import Iterator

from cli.errors import CommandError

LOOPBACK = "127.0.0.1"


def require_free(host: str, port: int) -> None:
    """Raises CommandError, naming the address, when nobody could listen on it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: past TIME_WAIT
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(
                f"port {port} on {host} is in use; stop what listens there, or choose another --port"
            ) from None
        raise CommandError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None


@contextlib.contextmanager
def held_ports(but_not: int | None = None) -> Iterator[Iterator[int]]:
    """As many ports of the loopback address as are asked for, kept from everyone who takes just any port.

    Services load for seconds before they listen. A socket that is bound and never listens keeps the kernel from giving
    its port away meanwhile, and lets a server that names the port (with SO_REUSEADDR, as servers do) have it.
    """
    with contextlib.ExitStack() as holders:

        def draw() -> Iterator[int]:
            while True:
                holder = holders.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((LOOPBACK, 0))
                port = holder.getsockname()[1]
                if port != but_not:
                    yield port

        yield draw()
