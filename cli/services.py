"""The services of a local stack: which, on which ports, with which flags."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cli.options import StackOptions
from cli.ports import LOOPBACK
from cli.prepare import prepare
from cli.progress import Progress
from cli.readiness import until_grpc_serving, until_http_ready, until_port_open
from cli.stack import Service
from common.rpc.channel import Connector
from common.rpc.tls import load_identity

STAGE_INDEX, STAGE_WORKER, STAGE_GATEWAY = range(3)
_ON_THIS_MACHINE = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - looked up, never bound


def plan_services(options: StackOptions, ports: Iterator[int], progress: Progress) -> list[Service]:
    """The stack's services, the model prepared for them; the workers' `ports` are of the loopback address."""
    prepare(options.model, progress, options.numerics, verifies=False)
    return services_of(options, ports)


def services_of(options: StackOptions, ports: Iterator[int]) -> list[Service]:
    """In the order in which they start. Takes a port for each service but the gateway."""
    services: list[Service] = []
    redis_url = options.redis_url
    if not redis_url:
        index_port = next(ports)
        redis_url = f"redis://{LOOPBACK}:{index_port}/0"
        services.append(_index(index_port, options))
    connector = Connector(load_identity(Path(options.tls_dir) if options.tls_dir else None))
    flags = engine_flags(options, redis_url)
    decode_flags = [*flags, "--speculation" if options.speculation else "--no-speculation"]
    of_stack = f"-{options.port}" if options.redis_url else ""  # stacks that share an index need different worker ids
    addresses: dict[str, list[str]] = {"decode": [], "prefill": []}
    for role, count, role_flags in (
        ("decode", options.topology.num_decode, decode_flags),
        ("prefill", options.topology.num_prefill, flags),
    ):
        for number in range(count):
            port = next(ports)
            addresses[role].append(f"{LOOPBACK}:{port}")
            argv = _worker_argv(role, f"{role}-{number}{of_stack}", port, role_flags)
            until_ready = partial(until_grpc_serving, LOOPBACK, port, connector)
            services.append(Service(f"{role}-{number}{of_stack}", argv, STAGE_WORKER, until_ready, options.restart))
    return [*services, _gateway(options, addresses, redis_url)]


def engine_flags(options: StackOptions, redis_url: str) -> list[str]:
    flags = ["--model", options.model, "--redis-url", redis_url]
    if options.kv_memory_mib is not None:
        flags += ["--kv-memory-mib", str(options.kv_memory_mib)]
    if options.numerics is not None:
        flags += ["--numerics", options.numerics]
    return flags + _tls_flags(options)


def _python_module(module: str, *flags: str) -> tuple[str, ...]:
    """-P: the folder that the command runs in must not hide our packages behind namesakes."""
    return (sys.executable, "-P", "-m", module, *flags)


def _tls_flags(options: StackOptions) -> list[str]:
    return ["--tls-dir", options.tls_dir] if options.tls_dir else []


def _index(port: int, options: StackOptions) -> Service:
    argv = _python_module("common.prefix_index.embedded", "--port", str(port))
    return Service("prefix-index", argv, STAGE_INDEX, partial(until_port_open, LOOPBACK, port), options.restart)


def _worker_argv(role: str, worker_id: str, port: int, flags: list[str]) -> tuple[str, ...]:
    address = ("--host", LOOPBACK, "--port", str(port))
    return _python_module(f"{role}_svc", *address, "--worker-id", worker_id, *flags)


def _gateway(options: StackOptions, addresses: dict[str, list[str]], redis_url: str) -> Service:
    flags = ["--host", options.host, "--port", str(options.port), "--redis-url", redis_url]
    flags += _tls_flags(options)
    for role, listed in addresses.items():
        if listed:
            flags += [f"--{role}", ",".join(listed)]
    ready_url = f"http://{reachable(options.host)}:{options.port}/readyz"
    return Service("gateway", _python_module("gateway", *flags), STAGE_GATEWAY, partial(until_http_ready, ready_url))


def reachable(host: str) -> str:
    """The address for a client on this machine, as it stands in a URL."""
    host = _ON_THIS_MACHINE.get(host, host)
    return f"[{host}]" if ":" in host else host
