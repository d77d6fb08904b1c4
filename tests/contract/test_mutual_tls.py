"""Mutual TLS between services, over real connections: who gets in, who does not, and files that change meanwhile."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.engine_config import EngineSettings
from common.errors import ConfigError
from common.rpc.channel import Connector, open_channel
from common.rpc.server import WorkerServer
from common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity
from common.sampling import SamplingParams
from common.worker import make_server
from decode_svc.config import DecodeSettings
from prefill_svc.channels import ChannelPool
from prefill_svc.config import PrefillSettings
from tests.support.certificates import authority, replace_files
from tests.support.fake_workers import FakeDecode
from tests.support.gateway_stack import PATIENCE_S, GatewayStack
from tests.support.worker_pair import worker_pair

PROMPT = list(range(1, 20))
ANYONE_IPV4 = "0.0.0.0"


@pytest.fixture
def worker_files(tmp_path: Path) -> Path:
    return authority("ours").issue(tmp_path / "worker")


@pytest.fixture
def gateway_files(tmp_path: Path) -> Path:
    return authority("ours").issue(tmp_path / "gateway", "twostroke-gateway")


@asynccontextmanager
async def serving(
    files: Path, host: str = "127.0.0.1", health_address: str | None = None
) -> AsyncIterator[WorkerServer]:
    server = WorkerServer(f"{host}:0", tls=TlsIdentity(files), health_address=health_address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


async def is_served(channel: grpc.aio.Channel) -> bool:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def refusal(channel: grpc.aio.Channel) -> str:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await is_served(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def test_both_sides_show_a_certificate_of_the_deployments_authority(
    worker_files: Path, gateway_files: Path
) -> None:
    connector = Connector(TlsIdentity(gateway_files))
    async with serving(worker_files) as server, connector.open(server.address) as channel:
        assert await is_served(channel)


async def test_a_worker_of_another_authority_is_not_talked_to(tmp_path: Path, gateway_files: Path) -> None:
    async with serving(authority("foreign").issue(tmp_path / "foreign")) as server:
        why = await refusal(Connector(TlsIdentity(gateway_files)).open(server.address))
        assert "CERTIFICATE_VERIFY_FAILED" in why


async def test_who_is_no_worker_is_not_taken_for_one(gateway_files: Path) -> None:
    """A gateway's certificate is of the same authority, and must not be enough to receive prompts and blocks."""
    async with serving(gateway_files) as server:
        why = await refusal(Connector(TlsIdentity(gateway_files)).open(server.address))
        assert "Hostname Verification" in why


async def test_clients_of_another_authority_or_with_no_certificate_or_no_tls_are_refused(
    worker_files: Path, tmp_path: Path
) -> None:
    foreign = authority("foreign").issue(tmp_path / "foreign")
    (foreign / CA_FILE).write_bytes((worker_files / CA_FILE).read_bytes())  # it would trust us
    anonymous = grpc.ssl_channel_credentials((worker_files / CA_FILE).read_bytes())
    options = (("grpc.ssl_target_name_override", "twostroke-worker"),)
    async with serving(worker_files) as server:
        await refusal(Connector(TlsIdentity(foreign)).open(server.address))
        await refusal(grpc.aio.secure_channel(server.address, anonymous, options=options))
        await refusal(open_channel(server.address))


async def test_new_connections_use_files_that_have_changed_and_open_ones_go_on(
    worker_files: Path, gateway_files: Path, tmp_path: Path
) -> None:
    new_worker, new_gateway = (authority("next").issue(tmp_path / name, "twostroke-worker") for name in ("w", "g"))
    connector = Connector(TlsIdentity(gateway_files))
    async with serving(worker_files) as server, connector.open(server.address) as old:
        assert await is_served(old)
        version = connector.version
        replace_files(worker_files, new_worker)
        why = await refusal(connector.open(server.address))
        assert "CERTIFICATE_VERIFY_FAILED" in why, "the server shows its new certificate"
        replace_files(gateway_files, new_gateway)
        assert connector.version == version + 1
        async with connector.open(server.address) as new:
            assert await is_served(new)
        assert await is_served(old)


async def test_files_that_became_useless_are_named_and_the_old_ones_stay(
    worker_files: Path, gateway_files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_key = (authority("ours").issue(tmp_path / "other") / KEY_FILE).read_bytes()
    connector = Connector(TlsIdentity(gateway_files))
    async with serving(worker_files) as server:
        (worker_files / KEY_FILE).write_bytes(other_key)  # half of a change
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                async with connector.open(server.address) as channel:
                    assert await is_served(channel)
        assert caplog.text.count("the certificate in use stays") == 1
        assert str(worker_files / KEY_FILE) in caplog.text
        replace_files(worker_files, tmp_path / "other")  # the other half: a certificate that only the next one knows
        async with connector.open(server.address) as channel:
            assert await is_served(channel)


def test_files_behind_a_link_that_is_turned_are_a_change(tmp_path: Path) -> None:
    """How Kubernetes changes a mounted secret."""
    for name in ("first", "second"):
        authority("ours").issue(tmp_path / name)
    (tmp_path / "current").symlink_to("first")
    connector = Connector(TlsIdentity(tmp_path / "current"))
    assert [connector.version, connector.version] == [1, 1]
    (tmp_path / "fresh").symlink_to("second")
    (tmp_path / "fresh").replace(tmp_path / "current")
    assert connector.version == 2


@pytest.mark.parametrize("settings", [PrefillSettings, DecodeSettings])
async def test_workers_listen_as_their_settings_say(settings: type[EngineSettings], worker_files: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-unencrypted"):
        make_server(settings(host=ANYONE_IPV4), "x", None)
    await make_server(settings(host=ANYONE_IPV4, allow_unencrypted=True), "x", None).stop(0.0)
    server = make_server(settings(host=ANYONE_IPV4, health_port=0), "x", TlsIdentity(worker_files))
    assert server.health_address is not None
    await server.stop(0.0)


@pytest.mark.parametrize("name", [CERTIFICATE_FILE, KEY_FILE, CA_FILE])
@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_that_is_missing_or_broken_is_named(worker_files: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (worker_files / name).unlink()
    else:
        (worker_files / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        TlsIdentity(worker_files)


@pytest.mark.parametrize("address", [f"{ANYONE_IPV4}:0", "[::]:0", "10.1.2.3:0", "decode.example:0"])
async def test_other_machines_are_not_served_unencrypted_unless_that_is_allowed(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--tls-dir.*--allow-unencrypted"):
        WorkerServer(address)


async def test_other_machines_are_served_encrypted_or_where_it_is_allowed(worker_files: Path) -> None:
    async with serving(worker_files, ANYONE_IPV4):
        await WorkerServer(f"{ANYONE_IPV4}:0", allow_unencrypted=True).stop(0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_this_machine_is_served_as_plain_text(host: str) -> None:
    await WorkerServer(f"{host}:0").stop(0.0)


async def test_probes_reach_health_and_nothing_else_as_plain_text(worker_files: Path) -> None:
    async with serving(worker_files, health_address="127.0.0.1:0") as server:
        assert server.health_address is not None
        async with open_channel(server.health_address) as channel:
            assert await is_served(channel)
            await server.set_serving(False)
            assert not await is_served(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/twostroke.v1.Worker/Describe")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_whole_hand_off_under_mutual_tls_before_and_after_a_change_of_authority(
    worker_files: Path, tmp_path: Path
) -> None:
    params = SamplingParams(seed=3, max_tokens=12, temperature=0.8)
    async with worker_pair() as plain:
        expected = await plain.answer(PROMPT, params)
    async with worker_pair(tls=TlsIdentity(worker_files)) as pair:
        assert await pair.answer(PROMPT, params) == expected
        num_bytes = pair.prefill_servicer.kv_bytes_pushed
        assert num_bytes > 0
        replace_files(worker_files, authority("next").issue(tmp_path / "next"))
        assert await pair.answer(PROMPT[::-1], params)
        assert pair.prefill_servicer.kv_bytes_pushed > num_bytes


async def test_prefill_opens_its_channels_to_decode_anew_when_its_certificate_changed(
    worker_files: Path, gateway_files: Path, tmp_path: Path
) -> None:
    pool = ChannelPool(Connector(TlsIdentity(gateway_files)))
    async with serving(worker_files) as server:
        old = pool.get(server.address)
        assert pool.get(server.address) is old
        watch = health_pb2_grpc.HealthStub(old).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for files in (worker_files, gateway_files):
            replace_files(files, authority("next").issue(tmp_path / "next"))
        new = pool.get(server.address)
        assert new is not old
        assert await is_served(new)
        await server.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING, "an open call goes on"
        await pool.close()


async def test_the_gateway_says_what_is_wrong_and_finds_workers_again_with_its_new_certificate(
    gateway_files: Path, worker_files: Path, tmp_path: Path
) -> None:
    decode = FakeDecode("d0")
    decode.tls = TlsIdentity(worker_files)
    stack = GatewayStack([], [decode], connector=Connector(TlsIdentity(gateway_files)), describe_timeout_s=0.2)
    await stack.start()
    try:
        await stack.until_ready()
        replace_files(worker_files, authority("next").issue(tmp_path / "w"))
        await decode.stop()
        await decode.start()
        async with asyncio.timeout(PATIENCE_S):
            while "CERTIFICATE_VERIFY_FAILED" not in "".join(stack.registry.not_ready()):
                await stack.registry.next_change()
        replace_files(gateway_files, authority("next").issue(tmp_path / "g", "twostroke-gateway"))
        await stack.until_ready()
    finally:
        await stack.stop()
