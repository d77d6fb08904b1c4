"""The prefix index in Redis (6.2 or newer, or anything that speaks its protocol).

One set per holder, `twostroke:{namespace}:held:<worker id>:<incarnation hex>`, of 16-byte block hashes. Its time to
live is the holder's lease: a dead worker's entries expire by themselves, a restarted one starts under another key.
A set is bounded by its worker's block pool. Tenants may share an index: a block hash is seeded with a secret salt per
tenant (see `common.kv.block_hash`), so it tells nothing of the tokens, and two tenants never ask for the same one.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import ConfigError
from common.faults.injector import installed
from common.faults.points import Point
from common.ids import BlockHash
from common.prefix_index.base import Holder, PrefixIndexUnavailable

CHUNK_HASHES = 512
"""Members of one command: a long prompt or a large pool must not hold up the store's other clients."""
MAX_CONNECTIONS = 8

# All but the first two come out of the client's parser, where the peer does not speak the protocol.
_CLIENT_ERRORS = (RedisError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class RedisPrefixIndex:
    """Implements `PrefixIndex`. Connects when first used, and again after an outage."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        lease_s: float = 30.0,
        lookup_timeout_s: float = 0.5,
        update_timeout_s: float = 5.0,
    ) -> None:
        """`url` is `redis://host:port/database`; with a password `redis://user:password@host:port/database`, under TLS
        `rediss://...?ssl_ca_certs=FILE` (docs/deploying.md). `namespace` keeps deployments that share a Redis apart.

        A request waits for a lookup; nobody waits for an update, which may carry a whole pool.
        """
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                protocol=2,
                max_connections=MAX_CONNECTIONS,
                timeout=None,  # waiting for a connection counts towards the call's own timeout
                retry=Retry(NoBackoff(), 1),  # a pooled connection may have been closed by the store meanwhile
            )
        except ValueError as error:
            raise ConfigError(f"prefix index address is {_without_password(url)!r}: {_reason(url, error)}") from None
        self._redis = Redis.from_pool(pool)
        self._injector = installed()
        self._prefix = f"twostroke:{{{namespace}}}:held"
        self._lease_ms = round(lease_s * 1000)
        self._lookup_timeout_s = lookup_timeout_s
        self._update_timeout_s = update_timeout_s

    async def publish(self, holder: Holder, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        key = self._key(holder)
        async with self._bounded(self._update_timeout_s), self._redis.pipeline(transaction=True) as pipeline:
            for chunk in _chunks(list(removed)):
                pipeline.srem(key, *chunk)
            for chunk in _chunks(list(stored)):
                pipeline.sadd(key, *chunk)
            pipeline.pexpire(key, self._lease_ms)
            await pipeline.execute()

    async def replace(self, holder: Holder, held: Iterable[BlockHash]) -> None:
        key = self._key(holder)
        async with self._bounded(self._update_timeout_s), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(key)
            for chunk in _chunks(list(held)):
                pipeline.sadd(key, *chunk)
            pipeline.pexpire(key, self._lease_ms)
            await pipeline.execute()

    async def count(self, holder: Holder) -> int:
        async with self._bounded(self._update_timeout_s):
            count = await self._redis.scard(self._key(holder))
            if not isinstance(count, int):
                raise PrefixIndexUnavailable(f"the prefix index answered {count!r} where a count was expected")
            return count

    async def longest_prefix(self, hashes: Sequence[BlockHash], holders: Sequence[Holder]) -> Mapping[str, int]:
        if not hashes or not holders:
            return {}
        chunks = list(_chunks(hashes))
        async with self._bounded(self._lookup_timeout_s), self._redis.pipeline(transaction=False) as pipeline:
            for holder in holders:
                for chunk in chunks:
                    pipeline.smismember(self._key(holder), list(chunk))
            replies = await pipeline.execute()
        lengths: dict[str, int] = {}
        for index, holder in enumerate(holders):
            own = replies[index * len(chunks) : (index + 1) * len(chunks)]
            flags = _flags(own, len(hashes))
            lengths[holder.worker_id] = sum(1 for _ in takewhile(bool, flags))
        return lengths

    async def forget(self, holder: Holder) -> None:
        async with self._bounded(self._update_timeout_s):
            await self._redis.delete(self._key(holder))

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, holder: Holder) -> str:
        return f"{self._prefix}:{holder.worker_id}:{holder.incarnation.hex()}"

    @asynccontextmanager
    async def _bounded(self, timeout_s: float) -> AsyncIterator[None]:
        """Ends within `timeout_s`; whatever the store did wrong is PrefixIndexUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._injector is not None and await self._injector.pass_point(Point.INDEX_CALL) is not None:
                    raise ConnectionError("lost by an injected fault")
                yield
        except TimeoutError:
            raise PrefixIndexUnavailable(f"the prefix index did not answer within {timeout_s:g} s") from None
        except _CLIENT_ERRORS as error:
            raise PrefixIndexUnavailable(_explain(error)) from error


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*:).*@", r"\1***@", url)


def _reason(url: str, error: ValueError) -> str:
    """The client's words may repeat a part of the password."""
    return "no address (special characters of a password are written as %XX)" if "@" in url else str(error)


def _chunks(hashes: Sequence[BlockHash]) -> Iterable[Sequence[BlockHash]]:
    return (hashes[start : start + CHUNK_HASHES] for start in range(0, len(hashes), CHUNK_HASHES))


def _flags(replies: Sequence[Any], expected: int) -> list[int]:
    flags = [flag for reply in replies if isinstance(reply, list) for flag in reply]
    if len(flags) != expected or any(flag not in (0, 1) for flag in flags):
        raise PrefixIndexUnavailable(f"the prefix index answered {replies!r:.100} where {expected} flags were expected")
    return flags


def _explain(error: Exception) -> str:
    text = str(error)
    if "unknown command" in text.lower() and "smismember" in text.lower():
        return f"the prefix index needs Redis 6.2 or newer, which has SMISMEMBER: {text}"
    return f"the prefix index failed: {type(error).__name__}: {text}"
