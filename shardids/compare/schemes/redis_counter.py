"""A counter in Redis: INCR draws one key, INCRBY a block of them."""

from __future__ import annotations

from typing import Any, NoReturn

from shardids.compare.schemes.blocks import Blocks
from shardids.compare.schemes.scheme import About, Key, Needs, Scheme, Servers, Source, library
from shardids.errors import ConnectionFailed
from shardids.multimaster.mariadb_session import Login

KEY = "shardids:next"
"""The counter's key in Redis."""

BLOCK = 1000
"""The number of keys that a client takes at once by INCRBY."""

PERSISTENT = {"appendonly": "yes", "appendfsync": "everysec"}
"""The settings of a server that keeps the counter, as Redis' documentation advises for critical data."""

_SAFE = (
    "any number of clients, clocks that jump, crashes of the server; of the machine with appendfsync always"
)
_UNSAFE = "a server that comes back without its data or with an old snapshot; a failover, as replicas lag"


class RedisSource(Source):
    """Draws from a Redis server, with one round trip per call."""

    def __init__(self, login: Login) -> None:
        redis = library("redis")
        self._login, self._error = login, redis.exceptions.RedisError
        self._client: Any = redis.Redis(
            login.host,
            login.port,
            username=login.user,
            password=login.password,
            socket_timeout=5,
            retry=None,
        )
        try:
            self._client.ping()
        except self._error as error:
            self._client.close()
            self._fail(error)

    def draw(self) -> Key:
        try:
            key: int = self._client.incr(KEY)
        except self._error as error:
            self._fail(error)
        return key

    sets_aside = True

    def _draw_many(self, count: int) -> list[Key]:
        return list(self._set_aside(count))

    def _set_aside(self, count: int) -> range:
        try:
            last: int = self._client.incrby(KEY, count)
        except self._error as error:
            self._fail(error)
        return range(last - count + 1, last + 1)

    def _fail(self, error: Exception) -> NoReturn:
        at = f"{self._login.host}:{self._login.port}"
        raise ConnectionFailed(f"Redis at {at} gives no key: {error}") from error

    def close(self) -> None:
        self._client.close()


class RedisIncr(Scheme):
    """One INCR for each key."""

    about = About(
        name="redis",
        title="Redis INCR",
        central=True,
        needs=Needs(redis=(PERSISTENT,)),
        safe_under=_SAFE,
        unsafe_under=_UNSAFE,
        stops="all keys, when the one server is down",
        tells="the order of birth",
        settings="appendonly yes, appendfsync everysec; redis-py with hiredis",
        described_at="https://redis.io/docs/latest/commands/incr/",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        return RedisSource(servers.redis[0])


class RedisBlocks(Scheme):
    """One INCRBY for each block, whose keys the client hands out from memory."""

    about = About(
        name="redis-blocks",
        title="Redis INCRBY, blocks",
        central=True,
        needs=Needs(redis=(PERSISTENT,)),
        safe_under=_SAFE,
        unsafe_under=_UNSAFE,
        stops="all keys, when the one server is down and the client's block is used up",
        tells="nothing: clients use up their blocks at their own pace",
        settings=f"blocks of {BLOCK:,}; appendonly yes, appendfsync everysec; redis-py with hiredis",
        described_at="https://redis.io/docs/latest/commands/incrby/",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        return Blocks(RedisSource(servers.redis[0]), BLOCK)
