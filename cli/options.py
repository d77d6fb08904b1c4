"""What `up`, `run` and `demo` are asked for, checked when it is read from the command line."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self, TypeVar

from cli.topology import Topology

MAX_PORT = 65_535
NUMERICS = ("reference", "int8")  # `common.model.linear.Numerics`, which cannot be imported without torch
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Field names are those of the flags."""

    topology: Topology
    host: str
    port: int
    model: str  # the default's name, a .gguf file or a Hugging Face folder
    kv_memory_mib: int | None  # of each worker; None: the worker's own default
    numerics: str | None  # of all workers; None: the worker's own default
    speculation: bool
    redis_url: str  # empty: an embedded index is started
    grace_s: float
    start_timeout_s: float
    restart: bool = True  # workers and the index, when they end while the stack serves
    tls_dir: str = ""  # empty: plain text between the services, which listen on the loopback address alone

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", type=_topology, default="1p1d", metavar="SHAPE", help="colocated, 1p1d, 2p2d ... (default: 1p1d)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the gateway listens (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, help="the gateway's port (default: 8000)")
    add_model_argument(parser)
    parser.add_argument("--kv-memory-mib", type=_positive(int), metavar="N", help="KV cache of each worker")
    add_numerics_argument(parser)
    parser.add_argument("--no-speculation", dest="speculation", action="store_false", help="no draft tokens")
    parser.add_argument("--redis-url", default="", metavar="URL", help="prefix index in this Redis (default: embedded)")
    parser.add_argument(
        "--grace-s", type=_positive(float), default=10.0, metavar="S", help="time to end in; then the rest is killed"
    )
    parser.add_argument(
        "--start-timeout-s", type=_positive(float), default=600.0, metavar="S", help="time to become ready in"
    )
    parser.add_argument(
        "--no-restart", dest="restart", action="store_false", help="a worker that ends is the stack's end"
    )
    parser.add_argument(
        "--tls-dir",
        default="",
        metavar="DIR",
        help="mutual TLS between the services, with DIR's tls.crt, tls.key and ca.crt (default: none)",
    )


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="SmolLM2-135M-Instruct",
        metavar="PATH",
        help="a .gguf file or a Hugging Face folder (default: SmolLM2-135M-Instruct)",
    )


def add_numerics_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numerics",
        choices=NUMERICS,
        help="numeric path of the workers: fp32 products, or int8 products, exact on CPUs (default: int8 on a CPU)",
    )


def _topology(text: str) -> Topology:
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use 1 to {MAX_PORT}")
    return int(text)


def _positive(number: Callable[[str], NumberT]) -> Callable[[str], NumberT]:
    def parse(text: str) -> NumberT:
        try:
            value = number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return parse
