"""The supervisor with real child processes: they become ready, die, resist and end, and none is ever left behind.

Nothing here sleeps: stand-ins tell through a FIFO what happens to them, and its end-of-file is their end.
"""

import asyncio
import io
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from cli.errors import CommandError, ServiceDied
from cli.ports import held_ports
from cli.progress import Progress
from cli.readiness import until_grpc_serving, until_http_ready, until_port_open
from cli.stack import Service, Stack
from common.rpc.channel import Connector
from tests.support.stand_ins import Events, stand_in

LOOPBACK = "127.0.0.1"
LONG_S = 60.0  # longer than any test may take: what ends a test is an event, never this


@pytest.fixture
async def events(tmp_path: Path) -> AsyncIterator[Events]:
    opened = Events(tmp_path / "events")
    await opened.open()
    yield opened
    opened.close()


@pytest.fixture
def port() -> Iterator[int]:
    with held_ports() as ports:
        yield next(ports)


def make_stack(
    services: list[Service],
    log_dir: Path,
    out: io.StringIO | None = None,
    grace_s: float = LONG_S,
    start_s: float = LONG_S,
) -> Stack:
    return Stack(services, log_dir, Progress(out or io.StringIO()), grace_s, start_s)


async def start_supervisor(
    events: Events, tmp_path: Path, port: int, *worker_flags: str, grace_s: float = LONG_S
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.stand_in_supervisor", str(events.path), str(port), str(grace_s), *worker_flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TWOSTROKE_STATE_DIR": str(tmp_path / "state")},
    )


async def read_until(stream: asyncio.StreamReader | None, text: str) -> None:
    assert stream is not None
    while text not in (line := (await stream.readline()).decode()):
        assert line, f"the output ended without {text!r}"


async def test_services_end_from_the_gateway_inwards(events: Events, tmp_path: Path) -> None:
    names = [("index", 0), ("decode", 1), ("gateway", 2)]
    async with make_stack([stand_in(name, events.path, stage=stage) for name, stage in names], tmp_path) as stack:
        await stack.until_ready()
        await events.started(3)
    assert await events.until_all_gone() == [("gateway", "stopped"), ("decode", "stopped"), ("index", "stopped")]


async def test_a_service_that_resists_is_killed_after_the_grace_period(events: Events, tmp_path: Path) -> None:
    out = io.StringIO()
    async with make_stack([stand_in("deaf", events.path, "--ignore-sigterm")], tmp_path, out, grace_s=0.2):
        await events.started(1)
    assert await events.until_all_gone() == [("deaf", "ignored")]
    assert "killing deaf: not gone within 0.2 s" in out.getvalue()


async def test_a_service_that_ends_badly_is_named(events: Events, tmp_path: Path) -> None:
    out = io.StringIO()
    async with make_stack([stand_in("sloppy", events.path, "--last-exit-code", "4")], tmp_path, out):
        await events.started(1)
    assert f"sloppy ended with code 4; see {tmp_path / 'sloppy.log'}" in out.getvalue()


async def test_a_service_that_still_starts_may_die_of_sigterm(tmp_path: Path) -> None:
    out = io.StringIO()
    starting = Service("starting", ("sleep", "60"), 0, lambda: wait_for(asyncio.Event()))
    async with make_stack([starting], tmp_path, out):
        pass
    assert "ended with code" not in out.getvalue()


async def test_what_a_service_started_itself_ends_too(events: Events, tmp_path: Path) -> None:
    async with make_stack([stand_in("parent", events.path, "--with-grandchild")], tmp_path):
        await events.started(1)
    assert await events.until_all_gone() == [("parent", "stopped")]


async def test_a_death_at_start_is_named_with_code_and_log_and_ends_the_rest(events: Events, tmp_path: Path) -> None:
    never = asyncio.Event()
    broken = stand_in("broken", events.path, "--exit-code", "3")
    patient = stand_in("patient", events.path, until_ready=lambda: wait_for(never))
    with pytest.raises(ServiceDied) as caught:
        async with make_stack([patient, broken], tmp_path) as stack:
            await stack.until_ready()
    await events.until_all_gone()
    message = str(caught.value)
    assert "broken exited with code 3" in message
    assert str(tmp_path / "broken.log") in message
    shown = [line.strip() for line in message.splitlines()[1:]]
    assert shown == [f"line {number}" for number in range(10, 30)]  # the last 20 of 30


async def test_a_death_while_serving_ends_what_goes_on(events: Events, tmp_path: Path) -> None:
    async def serve() -> None:
        async with make_stack([stand_in("victim", events.path), stand_in("other", events.path)], tmp_path) as stack:
            await stack.until_ready()
            pids = await events.started(2)
            os.kill(pids["victim"], signal.SIGKILL)
            await stack.serve()

    with pytest.raises(ServiceDied, match="victim was killed by signal 9"):
        await serve()
    assert await events.until_all_gone() == [("other", "stopped")]


async def test_a_death_says_more_than_the_broken_connection_it_causes(events: Events, tmp_path: Path) -> None:
    async def fail_first(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        raise CommandError("connection reset")

    async def use() -> None:
        async with make_stack([stand_in("victim", events.path)], tmp_path) as stack:
            pids = await events.started(1)
            await stack.guard(fail_first(pids["victim"]))

    with pytest.raises(ServiceDied):
        await use()


async def test_guarded_work_returns_its_result_and_its_own_error(events: Events, tmp_path: Path) -> None:
    async def work() -> str:
        return "done"

    async def fail() -> None:
        raise CommandError("no answer")

    async with make_stack([stand_in("service", events.path)], tmp_path) as stack:
        await events.started(1)
        assert await stack.guard(work()) == "done"
        with pytest.raises(CommandError, match="no answer"):
            await stack.guard(fail())


async def test_a_service_that_never_serves_is_given_up(events: Events, tmp_path: Path) -> None:
    async def start() -> None:
        silent = stand_in("silent", events.path, until_ready=lambda: wait_for(asyncio.Event()))
        async with make_stack([silent], tmp_path, start_s=0.1) as stack:
            await events.started(1)
            await stack.until_ready()

    with pytest.raises(CommandError, match=r"not ready within 0\.1 s"):
        await start()
    await events.until_all_gone()


async def test_readiness_follows_the_health_service(events: Events, tmp_path: Path, port: int) -> None:
    until_ready = partial(until_grpc_serving, LOOPBACK, port, Connector())
    flags = ("--serve", "grpc", "--port", str(port))
    async with make_stack([stand_in("worker", events.path, *flags, until_ready=until_ready)], tmp_path) as stack:
        waiting = asyncio.create_task(stack.until_ready())
        pids = await events.started(1)
        await until_port_open(LOOPBACK, port)
        assert not waiting.done()
        os.kill(pids["worker"], signal.SIGUSR1)
        await waiting


async def test_readiness_follows_readyz(events: Events, tmp_path: Path, port: int) -> None:
    until_ready = partial(until_http_ready, f"http://{LOOPBACK}:{port}/readyz")
    flags = ("--serve", "http", "--port", str(port))
    async with make_stack([stand_in("gateway", events.path, *flags, until_ready=until_ready)], tmp_path) as stack:
        waiting = asyncio.create_task(stack.until_ready())
        pids = await events.started(1)
        await until_port_open(LOOPBACK, port)
        assert not waiting.done()
        os.kill(pids["gateway"], signal.SIGUSR1)
        await waiting


async def test_sigterm_to_the_supervisor_ends_everything_in_order(events: Events, tmp_path: Path, port: int) -> None:
    supervisor = await start_supervisor(events, tmp_path, port)
    await read_until(supervisor.stdout, "Serving on")
    await events.started(2)
    supervisor.terminate()
    assert await events.until_all_gone() == [("gateway", "stopped"), ("worker", "stopped")]
    out, err = await supervisor.communicate()
    assert (supervisor.returncode, err) == (0, b"")
    assert b"no process is left" in out


async def test_a_second_signal_does_not_wait_for_the_grace_period(events: Events, tmp_path: Path, port: int) -> None:
    supervisor = await start_supervisor(events, tmp_path, port, "--ignore-sigterm")
    await read_until(supervisor.stdout, "Serving on")
    await events.started(2)
    supervisor.send_signal(signal.SIGINT)
    assert (await events.next())[:2] == ("gateway", "stopped")
    assert (await events.next())[:2] == ("worker", "ignored")
    supervisor.send_signal(signal.SIGINT)
    assert await events.until_all_gone() == []
    out, _ = await supervisor.communicate()
    assert supervisor.returncode == 0
    assert b"killing worker: asked a second time to stop" in out


async def test_services_do_not_outlive_a_killed_supervisor(events: Events, tmp_path: Path, port: int) -> None:
    supervisor = await start_supervisor(events, tmp_path, port, "--ignore-sigterm")
    await events.started(2)
    supervisor.kill()
    assert await events.until_all_gone() == []
    await supervisor.communicate()
    assert supervisor.returncode == -signal.SIGKILL


async def test_a_service_that_dies_stops_the_command_with_code_1(events: Events, tmp_path: Path, port: int) -> None:
    supervisor = await start_supervisor(events, tmp_path, port)
    await read_until(supervisor.stdout, "Serving on")
    pids = await events.started(2)
    os.kill(pids["worker"], signal.SIGKILL)
    assert await events.until_all_gone() == [("gateway", "stopped")]
    _, err = await supervisor.communicate()
    assert supervisor.returncode == 1
    assert err.decode().startswith("twostroke: worker was killed by signal 9; its log ")


async def test_a_port_in_use_is_named_before_anything_starts(events: Events, tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        supervisor = await start_supervisor(events, tmp_path, port)
        _, err = await supervisor.communicate()
    assert supervisor.returncode == 1
    assert err.decode().startswith(f"twostroke: port {port} on {LOOPBACK} is in use")
    assert await events.until_all_gone() == []


async def test_a_second_stack_on_the_same_port_is_refused_while_the_first_starts(
    events: Events, tmp_path: Path, port: int
) -> None:
    first = await start_supervisor(events, tmp_path, port)
    await events.started(2)  # nothing listens on the port: stand-ins do not
    second = await start_supervisor(events, tmp_path, port)
    _, err = await second.communicate()
    assert second.returncode == 1
    assert f"port {port} is in use by another local stack" in err.decode()
    first.terminate()
    await events.until_all_gone()
    await first.communicate()


async def wait_for(event: asyncio.Event) -> None:
    await event.wait()
