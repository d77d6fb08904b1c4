"""`python -m common.prefix_index.embedded --port N`: a prefix index for a machine without Redis.

fakeredis behind a TCP socket: the client, its commands and its failures are the same as with Redis. Nothing is kept
on disk. Why this and what it costs: docs/adr/0001-embedded-prefix-index.md.
"""

import logging
import signal
import sys
from threading import Event, Thread

from fakeredis import TcpFakeServer
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.config import Settings, load_or_exit
from common.logs import fields, setup_logging

log = logging.getLogger("twostroke.prefix_index")


class EmbeddedIndexSettings(Settings):
    program = "python -m common.prefix_index.embedded"
    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_EMBEDDED_INDEX_")

    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535, description="0: any free port")


def main(argv: list[str]) -> int:
    """Serves until SIGTERM or SIGINT; 0 then, 1 when the port is in use."""
    settings = load_or_exit(EmbeddedIndexSettings, argv)
    setup_logging("embedded-index")
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = _listen(settings.host, settings.port)
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        return 1
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="accept")
    serving.start()
    log.info("the embedded prefix index listens", extra=fields(host=settings.host, port=server.server_address[1]))
    stop.wait()
    server.shutdown()
    server.server_close()
    serving.join()
    return 0


def _listen(host: str, port: int) -> TcpFakeServer:
    server = TcpFakeServer((host, port), server_type="redis", server_version=(7, 0))
    # With Nagle's algorithm every call would wait about 40 ms for the client's delayed acknowledgement.
    server.RequestHandlerClass.disable_nagle_algorithm = True
    return server


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
