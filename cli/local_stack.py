"""A whole stack on this machine, from a free port to the last process gone. `up`, `run` and `demo` are this."""

import asyncio
import contextlib
import fcntl
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from cli.config import run_dir, spans_dir
from cli.errors import CommandError
from cli.options import StackOptions
from cli.ports import held_ports, require_free
from cli.program import program
from cli.progress import Progress
from cli.served import ServedModel, fetch_model
from cli.services import plan_services, reachable
from cli.stack import Service, Stack

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FirstUse = Callable[[str], Coroutine[Any, Any, None]]  # takes the endpoint's URL
Identify = Callable[[str], Coroutine[Any, Any, ServedModel]]  # takes the endpoint's URL
Plan = Callable[[StackOptions, Iterator[int], Progress], list[Service]]


class LocalStack:
    """Starts what `plan` says, does `first_use` once it is ready, then serves, unless told not to."""

    def __init__(
        self,
        options: StackOptions,
        first_use: FirstUse | None = None,
        *,
        then_serve: bool = True,
        plan: Plan = plan_services,
        identify: Identify = fetch_model,
    ) -> None:
        self._options = options
        self._first_use = first_use
        self._then_serve = then_serve
        self._plan = plan
        self._identify = identify
        self._progress = Progress(sys.stdout)
        self._log_dir = run_dir(options.port)
        self._url = f"http://{reachable(options.host)}:{options.port}"

    def run(self) -> int:
        """Returns the exit code after a signal, or after `first_use`; then no process of the stack is left."""
        with _only_one(self._log_dir, self._options.port):
            require_free(self._options.host, self._options.port)
            with held_ports(but_not=self._options.port) as ports:
                return asyncio.run(self._run(self._plan(self._options, ports, self._progress)))

    async def _run(self, services: list[Service]) -> int:
        """Being cancelled is how a signal arrives: a success once the stack was ready, for that is how serving ends."""
        _cancel_on_signals(self._progress)
        is_ready = False
        names = ", ".join(service.name for service in services)
        self._progress.step(f"starting {names} (logs in {self._log_dir})")
        try:
            async with self._stack(services) as stack:
                await stack.until_ready()
                is_ready = True
                served = await stack.guard(self._identify(self._url))
                if self._first_use is not None:
                    await stack.guard(self._first_use(self._url))
                if self._then_serve:
                    self._announce(served)
                    await stack.serve()
                self._progress.step("stopping")
        except asyncio.CancelledError:
            if not is_ready:
                raise CommandError("stopped before the stack was ready") from None
        self._progress.step("stopped; no process is left")
        return 0

    def _stack(self, services: list[Service]) -> Stack:
        options = self._options
        return Stack(services, self._log_dir, self._progress, options.grace_s, options.start_timeout_s)

    def _announce(self, served: ServedModel) -> None:
        topology, command = self._options.topology, program()
        print(f"\nServing on {self._url}/v1 until Ctrl-C.")
        print(f"  model     {served.name}")
        print(f"  numerics  {served.numerics}, {served.exactness}")
        print(f"  topology  {topology}: {topology.describe()}")
        print(f"  logs      {self._log_dir}")
        print(f"  spans     {spans_dir()} ({command} trace draws the last request)")
        print(f"  talk      {command} chat --url {self._url}", flush=True)


def _cancel_on_signals(progress: Progress) -> None:
    """The first signal ends the stack in order; a second one, during that, ends it at once (see Stack)."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def stop(name: str) -> None:
        progress.step(f"{name}: stopping")
        task.cancel()

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            loop.add_signal_handler(number, stop, number.name)


@contextlib.contextmanager
def _only_one(folder: Path, port: int) -> Iterator[None]:
    """Between the check of the port and the gateway's listening lie seconds: the lock keeps a second stack out."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"port {port} is in use by another local stack; stop it, or choose another --port"
            ) from None
        yield
