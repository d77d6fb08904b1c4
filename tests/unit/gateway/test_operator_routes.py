"""Looking at workers and draining one: who may, whom it reaches, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError, PeerLost
from gateway.config import read_operator_key
from gateway.operator_access import OperatorAccess
from tests.support.fake_worker import GRACE_S, fail_with
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_app import TestGateway, assert_refused
from tests.support.gateway_stack import GatewayStack, make_generation, running, wanted

KEY = b"an operator's key"
WORKERS = "/operations/workers"


@asynccontextmanager
async def gateway_over(stack: GatewayStack) -> AsyncIterator[TestGateway]:
    async with running(stack):
        yield TestGateway(workers=stack.registry)


async def put(gateway: TestGateway, worker: str, query: str = "", authorization: str | None = None):
    headers = {} if authorization is None else {"authorization": authorization}
    async with gateway.client() as client:
        return await client.put(f"{WORKERS}/{worker}/drain{query}", headers=headers)


def two_each() -> GatewayStack:
    return GatewayStack([FakePrefill("p0"), FakePrefill("p1")], [FakeDecode("d0"), FakeDecode("d1")])


async def test_workers_are_listed_with_their_state() -> None:
    stack = two_each()
    async with gateway_over(stack) as gateway, gateway.client() as client:
        listed = {worker["id"]: worker for worker in (await client.get(WORKERS)).json()["workers"]}
    assert listed.keys() == {"p0", "p1", "d0", "d1"}
    d0 = listed["d0"]
    assert (d0["role"], d0["address"], d0["state"], d0["is_draining"]) == (
        "decode",
        stack.decode[0].address,
        "ready",
        False,
    )
    assert d0["incarnation"] == stack.decode[0].incarnation.hex()


@pytest.mark.parametrize("by", ["id", "address"])
async def test_a_drained_worker_gets_no_more_work_and_no_other_is_touched(by: str) -> None:
    stack = two_each()
    async with gateway_over(stack) as gateway:
        d0, d1 = stack.decode
        response = await put(gateway, "d0" if by == "id" else d0.address)
        assert response.status_code == 200, response.text
        assert (response.json()["id"], response.json()["grace_s"]) == ("d0", GRACE_S)
        assert [fake.points.num_reached["drain"] for fake in stack.fakes] == [0, 0, 1, 0]
        await stack.until_draining(d0)
        for seed in range(4):
            outcome = await stack.run(make_generation(seed=seed))
            assert outcome.token_ids == wanted(make_generation(seed=seed))
        assert len(d1.requests) == 4


async def test_the_last_decode_worker_is_drained_only_by_force() -> None:
    stack = two_each()
    async with gateway_over(stack) as gateway:
        await put(gateway, "d0")
        await stack.until_draining(stack.decode[0])
        response = await put(gateway, "d1")
        assert_refused(response, 409, "last_worker", None, "d1", "only decode worker")
        assert (await put(gateway, "d0")).status_code == 200, "it may be repeated"
        assert (await put(gateway, "d1", "?force=true")).status_code == 200
        assert (await put(gateway, "p0")).status_code == 200
        assert (await put(gateway, "p1")).status_code == 200, "decode computes prompts then"


async def test_who_is_not_there_and_what_is_no_flag_is_named() -> None:
    async with gateway_over(two_each()) as gateway:
        assert_refused(await put(gateway, "d7"), 404, "worker_not_found", "worker", "'d7'", "d0, d1, p0, p1")
        assert_refused(await put(gateway, "d0", "?force=maybe"), 400, "invalid_value", "force", "'maybe'")


async def test_a_worker_that_cannot_be_reached_is_named() -> None:
    stack = two_each()
    async with gateway_over(stack) as gateway:
        stack.prefill[0].points.actions["drain"] = fail_with(PeerLost("gone"))
        response = await put(gateway, "p0")
    assert (response.status_code, response.json()["error"]["code"]) == (502, "peer_lost")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        (f"Basic {KEY.decode()}", 401),
        (f"Bearer {KEY.decode()}", 404),
    ],
)
async def test_with_a_key_only_its_holder_may(authorization: str | None, status: int) -> None:
    """A tenant's key is not enough."""
    gateway = TestGateway(operator=OperatorAccess(KEY, is_local=True), tenants_by_api_key={"wrong": "tenant"})
    response = await put(gateway, "d0", authorization=authorization)
    assert response.status_code == status
    assert KEY.decode() not in response.text
    async with gateway.client() as client:
        headers = {"authorization": authorization} if authorization else {}
        assert (await client.get(WORKERS, headers=headers)).status_code == (401 if status == 401 else 200)


async def test_without_a_key_nobody_may_where_other_machines_are_served() -> None:
    gateway = TestGateway(operator=OperatorAccess(None, is_local=False))
    response = await put(gateway, "d0", authorization="Bearer x")
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
    assert "--operator-key-file" in response.text


async def test_a_browser_cannot_be_made_to_drain() -> None:
    """A page may POST anywhere unasked; a PUT needs the server's leave, which is never given."""
    gateway = TestGateway()
    assert (await gateway.post(f"{WORKERS}/d0/drain", b"")).status_code == 405
    async with gateway.client() as client:
        asked = {"origin": "http://elsewhere", "access-control-request-method": "PUT"}
        response = await client.options(f"{WORKERS}/d0/drain", headers=asked)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


def test_an_operators_key_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("short\n")
    with pytest.raises(ConfigError, match=r"operator_key_file.* at least 16"):
        read_operator_key(path)
    path.write_bytes(KEY + b"\n")
    assert read_operator_key(path) == KEY


async def test_workers_that_are_drained_and_restarted_one_by_one_fail_no_request() -> None:
    """The gateway's part of a rolling restart; `make rolling` does it with real workers."""
    stack = two_each()
    async with gateway_over(stack) as gateway:
        is_over = asyncio.Event()
        num_right = 0

        async def ask(client: int) -> None:
            nonlocal num_right
            seed = client
            while not is_over.is_set():
                outcome = await stack.run(make_generation(seed=seed))
                assert outcome.token_ids == wanted(make_generation(seed=seed))
                num_right += 1
                seed += 10

        clients = [asyncio.create_task(ask(client)) for client in range(4)]
        for fake in stack.fakes:
            assert (await put(gateway, fake.worker_id)).status_code == 200
            await stack.until_draining(fake)
            while fake.num_open:
                await asyncio.sleep(0)
            await fake.stop()
            fake.set_status(is_draining=False)
            await fake.start()
            await stack.until_ready(fake)
        is_over.set()
        await asyncio.gather(*clients)
        assert num_right >= len(clients)
