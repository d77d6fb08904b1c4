"""The supervisor starts services again that may be, with real child processes; see test_supervisor.py for the rest."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli import restart
from cli.errors import ServiceDied
from cli.progress import Progress
from cli.stack import Service, Stack
from tests.support.stand_ins import Events, stand_in

LONG_S = 60.0


@pytest.fixture
async def events(tmp_path: Path) -> AsyncIterator[Events]:
    opened = Events(tmp_path / "events")
    await opened.open()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "FIRST_PAUSE_S", 0.0)


@asynccontextmanager
async def serving(services: list[Service], tmp_path: Path, out: io.StringIO) -> AsyncIterator["asyncio.Task[None]"]:
    async with Stack(services, tmp_path, Progress(out), LONG_S, LONG_S) as stack:
        await stack.until_ready()
        task = asyncio.create_task(stack.serve())
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_ends_well_or_is_killed_is_started_again_and_the_others_go_on(
    events: Events, tmp_path: Path
) -> None:
    out = io.StringIO()
    worker = stand_in("worker", events.path, may_restart=True)
    async with serving([worker, stand_in("gateway", events.path, stage=2)], tmp_path, out) as task:
        pids = await events.started(2)
        os.kill(pids["worker"], signal.SIGTERM)
        assert (await events.next())[:2] == ("worker", "stopped")
        second = (await events.started(1))["worker"]
        os.kill(second, signal.SIGKILL)
        third = (await events.started(1))["worker"]
        assert len({pids["worker"], second, third}) == 3
        assert not task.done()
    assert await events.until_all_gone() == [("gateway", "stopped"), ("worker", "stopped")]
    assert "worker exited with code 0; it is started again now" in out.getvalue()
    assert "worker was killed by signal 9; it is started again" in out.getvalue()


async def test_the_end_of_one_that_may_not_restart_is_the_stacks(events: Events, tmp_path: Path) -> None:
    worker = stand_in("worker", events.path, may_restart=True)
    async with serving([worker, stand_in("gateway", events.path, stage=2)], tmp_path, io.StringIO()) as task:
        pids = await events.started(2)
        os.kill(pids["gateway"], signal.SIGKILL)
        with pytest.raises(ServiceDied, match="gateway was killed by signal 9"):
            await task
    assert await events.until_all_gone() == [("worker", "stopped")]


async def test_one_that_cannot_start_any_more_is_given_up_with_its_log(events: Events, tmp_path: Path) -> None:
    script = tmp_path / "once.sh"
    script.write_text(f"echo begins; if [ -e {tmp_path}/again ]; then exit 3; fi; touch {tmp_path}/again; sleep 60")
    ready = asyncio.Event()

    async def until_ready() -> None:
        await ready.wait()
        ready.clear()

    worker = Service("worker", ("sh", str(script)), 1, until_ready, may_restart=True)
    ready.set()
    async with Stack([worker], tmp_path, Progress(io.StringIO()), LONG_S, LONG_S) as stack:
        await stack.until_ready()
        while not (tmp_path / "again").exists():
            await asyncio.sleep(0)
        stack._children[worker].kill_group()
        with pytest.raises(ServiceDied, match="worker exited with code 3") as caught:
            await stack.serve()
    assert str(caught.value).count("begins") == 1 + restart.MAX_FAILED_STARTS, "the log goes on over restarts"
