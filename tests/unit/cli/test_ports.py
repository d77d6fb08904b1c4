import socket

import pytest

from cli.errors import CommandError
from cli.ports import LOOPBACK, held_ports, require_free


def test_held_ports_differ_and_still_serve_who_names_them() -> None:
    with held_ports() as ports:
        drawn = [next(ports) for _ in range(20)]
        assert len(set(drawn)) == 20
        require_free(LOOPBACK, drawn[0])
        with socket.create_server((LOOPBACK, drawn[0])) as server, socket.create_connection((LOOPBACK, drawn[0])):
            server.accept()[0].close()


def test_a_held_port_is_not_given_to_who_takes_any() -> None:
    with held_ports() as ports:
        held = {next(ports) for _ in range(20)}
        with held_ports() as others:
            assert not held & {next(others) for _ in range(2000)}


def test_a_port_in_use_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} on {LOOPBACK} is in use"):
            require_free(LOOPBACK, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(CommandError, match=f"cannot listen on {host}:8000: .*choose another --host or --port"):
        require_free(host, 8000)
