"""The two receivers of a push, each in a process of its own: a decode worker as it is deployed, and the sink."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cli.ports import LOOPBACK, held_ports

_STOP_S = 60.0


class BenchFailed(Exception):
    """Nothing may be reported; `str` says why."""


@dataclass(frozen=True, slots=True)
class Receivers:
    decode_address: str
    sink_address: str


@contextmanager
def receivers(decode_arguments: Sequence[str]) -> Iterator[Receivers]:
    """Both; they end with the block. The decode worker may still be loading its model."""
    with held_ports() as ports:
        port = str(next(ports))
        with (
            tempfile.TemporaryFile() as log,
            _running("decode_svc", ["--port", port, *decode_arguments], stdout=log, stderr=log),
            _running("bench.hand_off.sink", [], stdout=subprocess.PIPE) as sink,
        ):
            assert sink.stdout is not None
            sink_address = sink.stdout.readline().decode().strip()
            if not sink_address:
                raise BenchFailed("the sink ended before it served")
            yield Receivers(f"{LOOPBACK}:{port}", sink_address)


@contextmanager
def _running(module: str, arguments: Sequence[str], **streams: object) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], **streams)  # type: ignore[call-overload]  # noqa: S603  ours
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
