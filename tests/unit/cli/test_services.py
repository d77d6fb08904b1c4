"""Which processes a topology starts, with which flags; the processes themselves are the supervisor's tests."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.options import StackOptions
from cli.services import engine_flags, reachable, services_of
from cli.topology import Topology
from common.errors import ConfigError
from tests.support.certificates import authority

OPTIONS = StackOptions(
    topology=Topology(2, 1),
    host="127.0.0.1",
    port=8000,
    model="/models/small",
    kv_memory_mib=64,
    numerics="int8",
    speculation=True,
    redis_url="",
    grace_s=10.0,
    start_timeout_s=60.0,
)
PORTS = [7000, 7001, 7002, 7003]


def flags_of(options: StackOptions) -> dict[str, list[str]]:
    return {service.name: list(service.argv) for service in services_of(options, iter(PORTS))}


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_every_service_of_a_topology_is_there_once() -> None:
    services = flags_of(OPTIONS)
    assert list(services) == ["prefix-index", "decode-0", "prefill-0", "prefill-1", "gateway"]
    modules = [argv[:4] for argv in services.values()]
    assert modules[1] == [sys.executable, "-P", "-m", "decode_svc"]
    assert modules[2] == modules[3] == [sys.executable, "-P", "-m", "prefill_svc"]


def test_the_gateway_is_told_where_the_workers_listen() -> None:
    services = flags_of(OPTIONS)
    assert value(services["gateway"], "--decode") == "127.0.0.1:" + value(services["decode-0"], "--port")
    prefill_ports = [value(services[name], "--port") for name in ("prefill-0", "prefill-1")]
    assert value(services["gateway"], "--prefill") == ",".join(f"127.0.0.1:{port}" for port in prefill_ports)
    ports = [value(argv, "--port") for argv in services.values()]
    assert len(set(ports)) == len(ports)


def test_everyone_uses_the_embedded_index_unless_a_redis_is_named() -> None:
    services = flags_of(OPTIONS)
    url = f"redis://127.0.0.1:{value(services.pop('prefix-index'), '--port')}/0"
    assert {value(argv, "--redis-url") for argv in services.values()} == {url}
    external = flags_of(replace(OPTIONS, redis_url="redis://cache:6379/1"))
    assert "prefix-index" not in external
    assert {value(argv, "--redis-url") for argv in external.values()} == {"redis://cache:6379/1"}


def test_workers_of_two_stacks_that_share_a_redis_have_different_ids() -> None:
    first = flags_of(replace(OPTIONS, redis_url="redis://cache:6379/1"))
    second = flags_of(replace(OPTIONS, redis_url="redis://cache:6379/1", port=9000))
    assert not (first.keys() & second.keys()) - {"gateway"}


def test_colocated_is_decode_alone_behind_the_gateway() -> None:
    services = flags_of(replace(OPTIONS, topology=Topology(0, 1)))
    assert list(services) == ["prefix-index", "decode-0", "gateway"]
    assert "--prefill" not in services["gateway"]


def test_an_identity_is_everyones_and_its_files_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        services_of(replace(OPTIONS, tls_dir=str(tmp_path)), iter(PORTS))
    files = str(authority("ours").issue(tmp_path / "tls"))
    services = flags_of(replace(OPTIONS, tls_dir=files))
    services.pop("prefix-index")
    assert {value(argv, "--tls-dir") for argv in services.values()} == {files}
    assert not any("--tls-dir" in argv for argv in flags_of(OPTIONS).values())


@pytest.mark.parametrize("restart", [True, False])
def test_all_but_the_gateway_may_be_started_again_unless_that_is_switched_off(restart: bool) -> None:
    services = services_of(replace(OPTIONS, restart=restart), iter(PORTS))
    assert {service.name for service in services if service.may_restart} == (
        {"prefix-index", "decode-0", "prefill-0", "prefill-1"} if restart else set()
    )


def test_engine_settings_reach_the_engines() -> None:
    services = flags_of(replace(OPTIONS, speculation=False))
    for name in ("decode-0", "prefill-0"):
        assert value(services[name], "--model") == "/models/small"
        assert value(services[name], "--kv-memory-mib") == "64"
        assert value(services[name], "--numerics") == "int8"
    assert "--no-speculation" in services["decode-0"]
    assert "--speculation" in flags_of(OPTIONS)["decode-0"]
    assert not any("speculation" in flag for flag in services["prefill-0"])
    left_to_the_worker = engine_flags(replace(OPTIONS, kv_memory_mib=None, numerics=None), "redis://x")
    assert not {"--kv-memory-mib", "--numerics"} & set(left_to_the_worker)


@pytest.mark.parametrize(
    ("host", "in_url"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("host.local", "host.local"),
    ],
)
def test_a_client_on_this_machine_reaches_the_gateway(host: str, in_url: str) -> None:
    assert reachable(host) == in_url
