"""What every prefix index promises, the in-process one, a real Redis and the embedded server alike."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.ids import BlockHash, Incarnation, mint_incarnation
from common.prefix_index.base import Holder, PrefixIndex
from common.prefix_index.memory import MemoryPrefixIndex
from common.prefix_index.redis import CHUNK_HASHES, RedisPrefixIndex
from tests.support.flaky_index import FlakyIndex
from tests.support.redis_server import running_embedded_index, running_redis

MEMORY, FAKE, REDIS, EMBEDDED = "memory", "fake", "redis", "embedded"
PATIENCE_S = 60.0  # the machine may be busy: these tests ask what is answered, not how fast


@pytest.fixture(scope="session", params=[MEMORY, FAKE, REDIS, EMBEDDED])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kind of index, or the address of a server."""
    if request.param == REDIS:
        with running_redis(tmp_path_factory.mktemp("redis")) as server:
            yield server.url
    elif request.param == EMBEDDED:
        with running_embedded_index() as (url, _):
            yield url
    else:
        yield request.param


@asynccontextmanager
async def open_index(store: str, namespace: str | None = None) -> AsyncIterator[PrefixIndex]:
    index: PrefixIndex
    if store == MEMORY:
        index = MemoryPrefixIndex()
    elif store == FAKE:
        index = FlakyIndex()
    else:
        namespace = namespace or uuid.uuid4().hex
        index = RedisPrefixIndex(store, namespace, lookup_timeout_s=PATIENCE_S, update_timeout_s=PATIENCE_S)
    try:
        yield index
    finally:
        await index.close()


@pytest.fixture
async def index(store: str) -> AsyncIterator[PrefixIndex]:
    async with open_index(store) as opened:
        yield opened


def names(first: int, last: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(16, "big")) for i in range(first, last)]


def holder(worker_id: str = "decode-0") -> Holder:
    return Holder(worker_id, mint_incarnation())


async def test_nothing_is_held_at_first(index: PrefixIndex) -> None:
    worker = holder()
    assert await index.count(worker) == 0
    assert (await index.longest_prefix(names(0, 3), [worker])).get(worker.worker_id, 0) == 0
    assert await index.longest_prefix([], [worker]) in ({}, {worker.worker_id: 0})
    assert await index.longest_prefix(names(0, 3), []) == {}


async def test_the_leading_run_ends_at_the_first_gap(index: PrefixIndex) -> None:
    worker = holder()
    await index.publish(worker, names(0, 3) + names(4, 9), [])
    assert await index.longest_prefix(names(0, 9), [worker]) == {worker.worker_id: 3}
    assert (await index.longest_prefix(names(3, 9), [worker])).get(worker.worker_id, 0) == 0
    assert await index.longest_prefix(names(4, 7), [worker]) == {worker.worker_id: 3}


async def test_each_worker_is_answered_for(index: PrefixIndex) -> None:
    workers = [holder(f"prefill-{i}") for i in range(5)]
    for i, worker in enumerate(workers):
        await index.publish(worker, names(0, i * 2), [])
    lengths = await index.longest_prefix(names(0, 7), workers)
    assert [lengths.get(worker.worker_id, 0) for worker in workers] == [0, 2, 4, 6, 7]


async def test_removals_are_applied_before_additions(index: PrefixIndex) -> None:
    worker = holder()
    await index.publish(worker, names(0, 4), [])
    await index.publish(worker, names(1, 2), names(1, 3))
    assert await index.count(worker) == 3
    assert await index.longest_prefix(names(0, 4), [worker]) == {worker.worker_id: 2}


async def test_publishing_twice_is_publishing_once(index: PrefixIndex) -> None:
    worker = holder()
    for _ in range(2):
        await index.publish(worker, names(0, 4), names(9, 12))
    assert await index.count(worker) == 4


async def test_an_empty_publish_changes_nothing(index: PrefixIndex) -> None:
    worker = holder()
    await index.publish(worker, [], [])
    assert await index.count(worker) == 0
    await index.publish(worker, names(0, 2), [])
    await index.publish(worker, [], [])
    assert await index.count(worker) == 2


async def test_another_incarnation_sees_nothing_of_the_last(index: PrefixIndex) -> None:
    before, after = holder("decode-0"), holder("decode-0")
    await index.publish(before, names(0, 4), [])
    assert await index.count(after) == 0
    assert (await index.longest_prefix(names(0, 4), [after])).get("decode-0", 0) == 0
    await index.publish(after, names(0, 2), [])
    assert await index.longest_prefix(names(0, 4), [after]) == {"decode-0": 2}


async def test_replace_makes_it_all_there_is(index: PrefixIndex) -> None:
    worker, other = holder("decode-0"), holder("decode-1")
    await index.publish(worker, names(0, 8), [])
    await index.publish(other, names(0, 8), [])
    await index.replace(worker, names(2, 5))
    assert await index.count(worker) == 3
    await index.replace(worker, [])
    assert await index.count(worker) == 0
    assert await index.count(other) == 8


async def test_forget_drops_one_holder(index: PrefixIndex) -> None:
    worker, other = holder("decode-0"), holder("decode-1")
    for each in (worker, other):
        await index.publish(each, names(0, 2), [])
    await index.forget(worker)
    await index.forget(worker)
    assert (await index.count(worker), await index.count(other)) == (0, 2)


@pytest.mark.parametrize("length", [CHUNK_HASHES - 1, CHUNK_HASHES, CHUNK_HASHES + 1, 3 * CHUNK_HASHES + 7])
async def test_a_chain_longer_than_one_command(index: PrefixIndex, length: int) -> None:
    worker, holed = holder("decode-0"), holder("decode-1")
    await index.replace(worker, names(0, length))
    await index.publish(holed, names(0, length), [])
    await index.publish(holed, [], names(length - 1, length))
    lengths = await index.longest_prefix(names(0, length + 5), [worker, holed])
    assert lengths == {"decode-0": length, "decode-1": length - 1}


async def test_hashes_are_bytes_and_not_text(index: PrefixIndex) -> None:
    nasty = [BlockHash(part.ljust(16, b"\0")) for part in (b"\r\n$16\r\n", b"", b"*3\r\n\xff\xfe", b"\n\n\n\n", b" \t")]
    worker = holder()
    await index.publish(worker, nasty, [])
    assert await index.count(worker) == len(nasty)
    assert await index.longest_prefix(nasty, [worker]) == {worker.worker_id: len(nasty)}


async def test_many_clients_at_once(store: str) -> None:
    """Workers and gateways have connections of their own; an in-process index is one object for all."""
    shared = None if store not in (MEMORY, FAKE) else store
    namespace = uuid.uuid4().hex
    workers = [holder(f"decode-{i}") for i in range(6)]
    async with open_index(store, namespace) as first:

        async def work(worker: Holder) -> None:
            async with open_index(store, namespace) as own:
                index = first if shared else own
                for step in range(20):
                    await index.publish(worker, names(step, step + 1), names(step - 2, step - 1) if step > 1 else [])
                    lengths = await index.longest_prefix(names(step, step + 3), workers)
                    assert lengths[worker.worker_id] == 1

        await asyncio.gather(*(work(worker) for worker in workers))
        assert [await first.count(worker) for worker in workers] == [2] * len(workers)


HASHES = names(0, 6)
WORKERS = [Holder(f"decode-{i // 2}", Incarnation(bytes([i]) * 16)) for i in range(4)]
HASH_LISTS = st.lists(st.sampled_from(HASHES), max_size=4)
CHANGES = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from(WORKERS), HASH_LISTS, HASH_LISTS),
    st.tuples(st.just("replace"), st.sampled_from(WORKERS), HASH_LISTS, st.just([])),
    st.tuples(st.just("forget"), st.sampled_from(WORKERS), st.just([]), st.just([])),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(CHANGES, max_size=8), chain=st.permutations(HASHES))
def test_any_history_agrees_with_sets(
    store: str, changes: list[tuple[str, Holder, list[BlockHash], list[BlockHash]]], chain: list[BlockHash]
) -> None:
    asyncio.run(_check_history(store, changes, chain))


async def _check_history(
    store: str, changes: list[tuple[str, Holder, list[BlockHash], list[BlockHash]]], chain: list[BlockHash]
) -> None:
    model: dict[Holder, set[BlockHash]] = {worker: set() for worker in WORKERS}
    async with open_index(store) as index:
        for action, worker, some, removed in changes:
            if action == "publish":
                await index.publish(worker, some, removed)
                model[worker] = (model[worker] - set(removed)) | set(some)
            elif action == "replace":
                await index.replace(worker, some)
                model[worker] = set(some)
            else:
                await index.forget(worker)
                model[worker] = set()
        for worker, held in model.items():
            assert await index.count(worker) == len(held)
            run = next((i for i, name in enumerate(chain) if name not in held), len(chain))
            assert (await index.longest_prefix(chain, [worker])).get(worker.worker_id, 0) == run
