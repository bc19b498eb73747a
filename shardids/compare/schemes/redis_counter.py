"""A counter in Redis: INCR draws one key, INCRBY a block of them; WAIT lets a replica confirm it."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from shardids.compare.multimaster.mariadb import Login
from shardids.compare.schemes.blocks import Blocks
from shardids.compare.schemes.scheme import About, Key, Needs, Scheme, Servers, Source, library
from shardids.errors import ConnectionFailed

KEY = "shardids:next"
"""The counter's key in Redis."""

BLOCK = 1000
"""The number of keys that a client takes at once by INCRBY."""

PERSISTENT = {"appendonly": "yes", "appendfsync": "everysec"}
"""The settings of a server that keeps the counter, as Redis' documentation advises for critical data."""

CONFIRMED_MS = 500
"""How long a draw waits for the replica."""

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

    @property
    def is_primary(self) -> bool:
        """Returns whether the server takes writes."""
        try:
            return bool(self._client.role()[0] == b"master")
        except self._error as error:
            self._fail(error)

    def draw(self) -> Key:
        return self._last_of(1)

    sets_aside = True

    def _draw_many(self, count: int) -> list[Key]:
        return list(self._set_aside(count))

    def _set_aside(self, count: int) -> range:
        last = self._last_of(count)
        return range(last - count + 1, last + 1)

    def _last_of(self, count: int) -> int:
        """Return the last of so many keys."""
        try:
            return self._add(count)
        except self._error as error:
            self._fail(error)

    def _add(self, count: int) -> int:
        last: int = self._client.incrby(KEY, count)
        return last

    def _fail(self, error: Exception) -> NoReturn:
        at = f"{self._login.host}:{self._login.port}"
        raise ConnectionFailed(f"Redis at {at} gives no key: {error}") from error

    def close(self) -> None:
        self._client.close()


class ConfirmedRedisSource(RedisSource):
    """A source on the primary of a pair that gives out only keys that the replica has received."""

    def __init__(self, logins: tuple[Login, ...]) -> None:
        super().__init__(_primary_of(logins))

    def _add(self, count: int) -> int:
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.incrby(KEY, count)
            pipeline.wait(1, CONFIRMED_MS)
            last, confirmed = pipeline.execute()
        if not confirmed:
            raise ConnectionFailed(
                f"no replica of Redis has confirmed the key within {CONFIRMED_MS} ms",
                hint="The key is left unused. Draw again when the replica is back.",
            )
        return int(last)


def _primary_of(logins: tuple[Login, ...]) -> Login:
    """Return the server that takes writes, as Redis Sentinel would tell."""
    for login in logins:
        with contextlib.suppress(ConnectionFailed), RedisSource(login) as source:
            if source.is_primary:
                return login
    raise ConnectionFailed("no Redis server of the pair is a primary that answers")


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


class RedisConfirmed(Scheme):
    """INCR, and WAIT until the replica has it, in one round trip of the client."""

    about = About(
        name="redis-wait",
        title="Redis INCR with WAIT",
        central=True,
        needs=Needs(redis_pair=PERSISTENT),
        safe_under="any number of clients, clocks that jump, crashes of the servers, the loss of the primary"
        " if the replica that confirmed is promoted",
        unsafe_under="a replica that is promoted without its data, or while it loads it; several replicas, of"
        " which one that has not confirmed is promoted; both machines lost in their last second",
        stops="all keys, when the primary or the replica is down, until another is promoted or follows",
        tells="the order of birth",
        settings=f"a primary and a replica; INCR and WAIT 1 {CONFIRMED_MS} in one pipeline, and the key is"
        " used only if WAIT counts the replica; appendonly yes, appendfsync everysec; redis-py with hiredis",
        described_at="https://redis.io/docs/latest/commands/wait/",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        return ConfirmedRedisSource(servers.redis_pair)
