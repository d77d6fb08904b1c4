"""Addresses where a connection is never answered."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def accepts_and_says_nothing() -> Iterator[str]:
    """`host:port`: the kernel takes connections, and nobody ever reads or writes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield _address(listener)


@contextmanager
def black_hole() -> Iterator[str]:
    """`host:port`: packets vanish. The queue of connections to take is full, so that Linux drops what asks for one."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = [_begin_connection(listener) for _ in range(3)]
        try:
            yield _address(listener)
        finally:
            for connection in waiting:
                connection.close()


def _begin_connection(listener: socket.socket) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(listener.getsockname())
    return connection


def _address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"
