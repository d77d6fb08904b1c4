"""An index that is gone, slow, old or babbling is `PrefixIndexUnavailable`, in time; afterwards all is as before."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from common.errors import ConfigError
from common.ids import BlockHash, mint_incarnation
from common.kv.block_pool import BlockPool
from common.prefix_index.base import Holder, PrefixIndexUnavailable
from common.prefix_index.publisher import IndexPublisher
from common.prefix_index.redis import RedisPrefixIndex
from common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from tests.support.certificates import authority
from tests.support.redis_server import RedisServer, end, free_port, running_embedded_index, running_redis

HOLDER = Holder("decode-0", mint_incarnation())
NAMES = [BlockHash(i.to_bytes(16, "big")) for i in range(8)]
SOON_S = 0.05  # long enough for nothing that these tests ask of a server that cannot answer
PATIENCE_S = 60.0

CALLS: dict[str, Callable[[RedisPrefixIndex], Awaitable[object]]] = {
    "publish": lambda index: index.publish(HOLDER, NAMES, []),
    "replace": lambda index: index.replace(HOLDER, NAMES),
    "count": lambda index: index.count(HOLDER),
    "longest_prefix": lambda index: index.longest_prefix(NAMES, [HOLDER]),
    "forget": lambda index: index.forget(HOLDER),
}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@asynccontextmanager
async def open_index(url: str, timeout_s: float = PATIENCE_S) -> AsyncIterator[RedisPrefixIndex]:
    index = RedisPrefixIndex(url, "outage", lookup_timeout_s=timeout_s, update_timeout_s=timeout_s)
    try:
        yield index
    finally:
        await index.close()


@asynccontextmanager
async def babbling_server(answer: bytes, *, is_polite: bool = False) -> AsyncIterator[str]:
    """Answers whatever it is sent with `answer`; with b"" it never answers. A polite one greets clients properly."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                num_greetings = data.count(b"SETINFO") if is_polite else 0
                writer.write(b"+OK\r\n" * num_greetings or answer)
                await writer.drain()
        except ConnectionError:
            pass  # the client has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize("call", CALLS)
async def test_no_server(call: str) -> None:
    async with open_index(f"redis://127.0.0.1:{free_port()}/0") as index:
        with pytest.raises(PrefixIndexUnavailable):
            await CALLS[call](index)


@pytest.mark.parametrize("call", CALLS)
async def test_a_silent_server(call: str) -> None:
    async with babbling_server(b"") as url, open_index(url, SOON_S) as index:
        with pytest.raises(PrefixIndexUnavailable, match=r"did not answer within 0\.05 s"):
            await CALLS[call](index)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\xff\xfe\r\n",
        b":abc\r\n" * 40,
        b"$-7\r\n" * 40,
        b"*999\r\n" * 40,
        b"+OK\r\n" * 40,
        b"-ERR no\r\n" * 40,
        b"$16\r\nnot a hash, sorry\r\n" * 40,
    ],
)
async def test_a_server_of_another_kind(call: str, answer: bytes) -> None:
    """Whatever it says, the outcome is an answer of the right type or PrefixIndexUnavailable."""
    async with babbling_server(answer) as url, open_index(url, SOON_S) as index:
        try:
            result = await CALLS[call](index)
        except PrefixIndexUnavailable:
            return
    assert result is None, f"{call} took {answer!r} for {result!r}"


MARKERS = (b"*", b"$", b":", b"+", b"-", b"%", b"~", b">", b"_", b"#t", b"\r\n", b"1", b"-1", b"4", b"9" * 30, b"\xff")
REPLIES = (b":1\r\n", b"*4\r\n", b"+OK\r\n", b"+QUEUED\r\n", b"-MOVED 1 x\r\n", b"$0\r\n\r\n", b"*1\r\n" * 3000)
FRAGMENTS = st.sampled_from([*MARKERS, *REPLIES])


@settings(max_examples=60, deadline=None)
@given(call=st.sampled_from(list(CALLS)), fragments=st.lists(FRAGMENTS, max_size=8), is_polite=st.booleans())
def test_any_babble_raises_nothing_else(call: str, fragments: list[bytes], is_polite: bool) -> None:
    async def check() -> None:
        async with babbling_server(b"".join(fragments), is_polite=is_polite) as url, open_index(url, SOON_S) as index:
            with suppress(PrefixIndexUnavailable):
                await CALLS[call](index)

    asyncio.run(check())


async def test_a_redis_too_old_is_named(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--rename-command", "SMISMEMBER", "") as server:
        async with open_index(server.url) as index:
            await index.publish(HOLDER, NAMES, [])
            with pytest.raises(PrefixIndexUnavailable, match=r"needs Redis 6\.2 or newer"):
                await index.longest_prefix(NAMES, [HOLDER])


async def test_after_a_timeout_answers_belong_to_their_questions_again(redis_server: RedisServer) -> None:
    """A connection with an unread answer on it must not be used again."""
    async with open_index(redis_server.url) as index:
        await index.replace(HOLDER, NAMES[:3])
        redis_server.freeze()
        try:
            for call in ("longest_prefix", "count", "longest_prefix"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(CALLS[call](index), SOON_S)
        finally:
            redis_server.thaw()
        assert await index.count(HOLDER) == 3
        assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": 3}


async def test_a_lookup_that_was_cancelled_leaves_the_index_usable(redis_server: RedisServer) -> None:
    async with open_index(redis_server.url) as index:
        await index.replace(HOLDER, NAMES)
        for _ in range(20):
            lookup = asyncio.create_task(index.longest_prefix(NAMES, [HOLDER]))
            await asyncio.sleep(0)
            lookup.cancel()
            await asyncio.gather(lookup, return_exceptions=True)
        assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": len(NAMES)}


async def test_more_lookups_at_once_than_connections(redis_server: RedisServer) -> None:
    async with open_index(redis_server.url) as index:
        await index.replace(HOLDER, NAMES)
        lookups = [index.longest_prefix(NAMES[:n], [HOLDER]) for n in (1, 2, 4, 8) * 16]
        assert [length["decode-0"] for length in await asyncio.gather(*lookups)] == [1, 2, 4, 8] * 16


@pytest.fixture(params=["redis", "embedded"])
def server_url(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[str]:
    if request.param == "redis":
        yield redis_server.url
        return
    with running_embedded_index() as (url, _):
        yield url


async def test_entries_are_leased(server_url: str) -> None:
    """Each update renews the lease, so that a dead worker's entries expire by themselves."""
    index = RedisPrefixIndex(server_url, "leases", lease_s=40.0, update_timeout_s=PATIENCE_S)
    redis = Redis.from_url(server_url, protocol=2)
    key = f"twostroke:{{leases}}:held:decode-0:{HOLDER.incarnation.hex()}"
    try:
        for update in (index.publish(HOLDER, NAMES, []), index.replace(HOLDER, NAMES), index.publish(HOLDER, [], [])):
            await redis.persist(key)
            await update
            assert 0 < await redis.pttl(key) <= 40_000
        await redis.pexpire(key, 0)  # the lease ends
        assert await index.count(HOLDER) == 0
        assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": 0}
    finally:
        await redis.aclose()
        await index.close()


async def test_a_killed_redis_comes_back_empty_and_is_repaired(tmp_path: Path) -> None:
    pool = BlockPool(16)
    for block_id, name in zip(pool.allocate(8), NAMES, strict=True):
        pool.register(block_id, name)
    with running_redis(tmp_path) as server:
        async with open_index(server.url) as index:
            publisher = IndexPublisher(index, HOLDER, pool.take_changes, pool.held_hashes)
            await publisher.heartbeat()
            assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": 8}

            server.kill()
            with pytest.raises(PrefixIndexUnavailable):
                await index.longest_prefix(NAMES, [HOLDER])
            await publisher.heartbeat()
            assert not publisher.is_available

            server.start()
            assert await index.count(HOLDER) == 0
            await publisher.heartbeat()
            assert publisher.is_available
            assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": 8}


async def test_a_redis_that_restarts_unseen_is_repaired(tmp_path: Path) -> None:
    """No call failed, yet the entries are gone: the count tells."""
    pool = BlockPool(16)
    pool.register(pool.allocate(1)[0], NAMES[0])
    with running_redis(tmp_path) as server:
        async with open_index(server.url) as index:
            publisher = IndexPublisher(index, HOLDER, pool.take_changes, pool.held_hashes)
            await publisher.heartbeat()
            server.kill()
            server.start()
            await publisher.heartbeat()
            assert (publisher.is_available, publisher.num_repairs) == (True, 1)
            assert await index.count(HOLDER) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_embedded_server_ends_well_with_clients_connected(number: signal.Signals) -> None:
    with running_embedded_index() as (url, process):
        async with open_index(url) as index:
            assert await index.count(HOLDER) == 0
            process.send_signal(number)
            assert await asyncio.to_thread(end, process) == 0
            with pytest.raises(PrefixIndexUnavailable):
                await index.count(HOLDER)


def test_the_embedded_server_names_a_port_in_use(redis_server: RedisServer) -> None:
    command = [sys.executable, "-m", "common.prefix_index.embedded", "--port", str(redis_server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{redis_server.port}" in ended.stderr


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port/0"])
async def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=url):
        RedisPrefixIndex(url, "outage")


async def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reader:\*\*\*@localhost") as caught:
        RedisPrefixIndex("redis://reader:s3cr/e@t@localhost:port/0", "outage")
    assert "s3cr" not in str(caught.value)
    assert "%XX" in str(caught.value)
    with running_redis(tmp_path, "--requirepass", "right") as server:
        async with open_index(server.url.replace("//", "//:wr0ng@")) as index:
            with pytest.raises(PrefixIndexUnavailable, match="AuthenticationError") as refused:
                await index.count(HOLDER)
    assert "wr0ng" not in str(refused.value)


async def test_tls_and_a_password_by_the_url_alone(tmp_path: Path) -> None:
    """Redis asks for our certificate too; one that is not of the CA that the URL names is not talked to."""
    ours = authority("ours")
    of_redis, of_client = ours.issue(tmp_path / "redis", "localhost"), ours.issue(tmp_path / "client", "client")
    foreign = authority("foreign").issue(tmp_path / "foreign")
    port = free_port()
    tls = ("--tls-port", str(port), "--tls-auth-clients", "yes", "--tls-ca-cert-file", str(of_redis / CA_FILE))
    tls += ("--tls-cert-file", str(of_redis / CERTIFICATE_FILE), "--tls-key-file", str(of_redis / KEY_FILE))
    url = f"rediss://:right@localhost:{port}/0?ssl_certfile={of_client / CERTIFICATE_FILE}"
    url += f"&ssl_keyfile={of_client / KEY_FILE}&ssl_ca_certs="
    with running_redis(tmp_path, "--requirepass", "right", *tls):
        async with open_index(f"{url}{of_client / CA_FILE}") as index:
            await index.publish(HOLDER, NAMES, [])
            assert await index.longest_prefix(NAMES, [HOLDER]) == {"decode-0": len(NAMES)}
        async with open_index(f"{url}{foreign / CA_FILE}") as index:
            with pytest.raises(PrefixIndexUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await index.count(HOLDER)
        async with open_index(f"redis://:right@localhost:{port}/0", SOON_S) as index:
            with pytest.raises(PrefixIndexUnavailable):
                await index.count(HOLDER)
