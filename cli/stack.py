"""Processes that belong together: started in one go, watched all the time, started again where that is allowed, ended
in order, none left behind.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cli.child import Child
from cli.config import service_environment
from cli.errors import CommandError, how_it_ended
from cli.progress import Progress
from cli.restart import Restarts

ResultT = TypeVar("ResultT")
REPORT_INTERVAL_S = 5.0
DEATH_NOTICE_S = 0.5


@dataclass(frozen=True, slots=True)
class Service:
    """What to start, and how to tell that it serves."""

    name: str
    argv: tuple[str, ...]
    stage: int  # ended from the highest stage to the lowest: who calls ends before who is called
    until_ready: Callable[[], Awaitable[None]]
    may_restart: bool = False  # when it ends while the stack serves; else its end is the stack's


class Stack:
    """`async with Stack(...) as stack:` starts every service; leaving it, however that happens, ends them all."""

    def __init__(
        self, services: Sequence[Service], log_dir: Path, progress: Progress, grace_s: float, start_timeout_s: float
    ) -> None:
        self._services = services
        self._log_dir = log_dir
        self._progress = progress
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._children: dict[Service, Child] = {}
        self._exits: dict[asyncio.Task[int], Child] = {}
        self._is_ready = False

    async def __aenter__(self) -> Self:
        try:
            for service in self._services:
                await self._start(service)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def until_ready(self) -> None:
        """Returns when every service serves. Raises ServiceDied, or CommandError past the start time-out."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self.guard(self._await_services())
                self._is_ready = True
        except TimeoutError:
            raise CommandError(
                f"the stack was not ready within {self._start_timeout_s:g} s; see the logs in {self._log_dir}"
            ) from None

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work`; raises ServiceDied, and cancels `work`, as soon as any service ends."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._exits], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:
                # A death shows first as a broken connection: the exit, which says more, is known a moment later.
                await asyncio.wait(self._exits, timeout=DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            self._raise_if_dead()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def serve(self) -> None:
        """Returns never. Raises ServiceDied when a service ends that may not be started again, or cannot be."""
        keeping = [asyncio.create_task(self._keep(service)) for service in self._services]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _start(self, service: Service) -> None:
        """A restarted service goes on in the log of its predecessor."""
        is_restart = service in self._children
        log_path = self._log_dir / f"{service.name}.log"
        child = await Child.start(service.name, service.argv, service_environment(), log_path, append=is_restart)
        self._children[service] = child
        self._exits = {task: known for task, known in self._exits.items() if known.name != service.name}
        self._exits[asyncio.create_task(child.wait())] = child

    async def _keep(self, service: Service) -> None:
        clock = asyncio.get_running_loop().time
        restarts = Restarts()
        ready_s: float | None = clock()
        while True:
            child = self._children[service]
            code = await child.wait()
            pause_s = None
            if service.may_restart:
                pause_s = restarts.pause_s(code, None if ready_s is None else clock() - ready_s)
            if pause_s is None:
                raise child.death()
            when = f"in {pause_s:g} s" if pause_s else "now"
            self._progress.step(f"{service.name} {how_it_ended(code)}; it is started again {when}")
            await asyncio.sleep(pause_s)
            await self._start(service)
            ready_s = clock() if await self._became_ready(service) else None

    async def _became_ready(self, service: Service) -> bool:
        """False: it ended first."""
        waiting = asyncio.create_task(_ready(service))
        exited = asyncio.create_task(self._children[service].wait())
        try:
            await asyncio.wait({waiting, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return False
            await waiting
        finally:
            for task in (waiting, exited):
                task.cancel()
            await asyncio.gather(waiting, exited, return_exceptions=True)
        self._progress.step(f"{service.name} is ready again")
        return True

    def _raise_if_dead(self) -> None:
        for exit_task, child in self._exits.items():
            if exit_task.done():
                raise child.death()

    async def _await_services(self) -> None:
        waiting = {asyncio.create_task(_ready(service)): service.name for service in self._services}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=REPORT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = waiting.pop(task)
                    task.result()
                    self._progress.step(f"{name} is ready")
                if not done:
                    self._progress.step(f"still waiting for {', '.join(waiting.values())}")
        finally:
            for task in waiting:
                task.cancel()

    async def _stop(self) -> None:
        """SIGTERM stage by stage within the grace period; then, or when cancelled meanwhile, SIGKILL for the rest."""
        alive = [child for child in self._children.values() if child.returncode is None]
        try:
            async with asyncio.timeout(self._grace_s):
                for stage in sorted({service.stage for service in self._children}, reverse=True):
                    members = [child for service, child in self._children.items() if service.stage == stage]
                    for child in members:
                        child.terminate()
                    await asyncio.gather(*(child.wait() for child in members))
            self._report_bad_ends(alive)
        except TimeoutError:
            self._report_killing(f"not gone within {self._grace_s:g} s")
        except asyncio.CancelledError:
            self._report_killing("asked a second time to stop")
        for child in self._children.values():
            child.kill_group()
        await asyncio.gather(*self._exits)

    def _report_bad_ends(self, children: Sequence[Child]) -> None:
        for child in children:
            # One that still starts has nothing to end in order yet, and dies of our SIGTERM.
            is_expected = child.returncode == -signal.SIGTERM and not self._is_ready
            if child.returncode and not is_expected:
                self._progress.step(f"{child.name} ended with code {child.returncode}; see {child.log_path}")

    def _report_killing(self, reason: str) -> None:
        alive = [child.name for child in self._children.values() if child.returncode is None]
        self._progress.step(f"killing {', '.join(alive)}: {reason}")


async def _ready(service: Service) -> None:
    await service.until_ready()
