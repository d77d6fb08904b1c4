"""A real process in a service's place: serves health as services do, and tells a FIFO what happens to it.

It holds the FIFO open for as long as it lives: the reader's end-of-file says that every process is gone.
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--fifo", required=True)
    parser.add_argument("--serve", choices=["none", "grpc", "http"], default="none")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--exit-code", type=int, help="end at once with it, after 30 lines of log")
    parser.add_argument("--last-exit-code", type=int, default=0, help="what SIGTERM ends in")
    parser.add_argument("--with-grandchild", action="store_true")
    arguments = parser.parse_args()
    fifo = os.open(arguments.fifo, os.O_WRONLY)
    os.set_inheritable(fifo, True)

    def tell(event: str) -> None:
        os.write(fifo, f"{arguments.name} {event} {os.getpid()}\n".encode())

    # Blocked here, and so in every thread: they arrive where they are waited for, and none is missed.
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ready = threading.Event()
    if arguments.with_grandchild:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[fifo])
    if arguments.exit_code is not None:
        for number in range(30):
            print(f"line {number}", flush=True)
        sys.exit(arguments.exit_code)
    _SERVERS[arguments.serve](arguments.port, ready)
    tell("started")
    while True:
        if signal.sigwait(signals) is signal.SIGUSR1:
            ready.set()
        elif arguments.ignore_sigterm:
            tell("ignored")
        else:
            break
    tell("stopped")
    os._exit(arguments.last_exit_code)


def _serve_grpc(port: int, ready: threading.Event) -> None:
    """NOT_SERVING until SIGUSR1."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    _GRPC_SERVERS.append(server)

    def become_ready() -> None:
        ready.wait()
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    threading.Thread(target=become_ready, daemon=True).start()


def _serve_http(port: int, ready: threading.Event) -> None:
    """503 until SIGUSR1."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if ready.is_set() and self.path == "/readyz" else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


_GRPC_SERVERS: list[grpc.Server] = []  # a server that nobody holds stops
_SERVERS = {"none": lambda port, ready: None, "grpc": _serve_grpc, "http": _serve_http}

if __name__ == "__main__":
    main()
