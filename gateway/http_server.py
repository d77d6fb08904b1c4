"""The HTTP server's socket and its end. What is served is the app's."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from common.errors import ConfigError
from gateway.http_connection import connection_class

LAST_WORDS_S = 2.0
"""After the drain, how long responses may take to reach their clients."""

KEEP_ALIVE_S = 75
"""Longer than common clients and proxies keep an idle connection, so that it is they who close it."""


def bind(host: str, port: int, client_timeout_s: float) -> socket.socket:
    """A socket bound to `host:port` (port 0: any free one). Raises ConfigError naming what is in the way.

    A client that takes nothing of what is sent to it for `client_timeout_s` loses its connection, as if it had left:
    else one that never reads would hold its request's place for ever.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror or error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The connections inherit it.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(client_timeout_s * 1000)))
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop the process that holds it, or choose another with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Ends when `should_exit` is set. Signals are the gateway's: a drain comes first."""

    def __init__(self, app: Any, client_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(client_timeout_s),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(LAST_WORDS_S),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
