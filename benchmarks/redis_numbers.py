"""Numbers for people from Redis, as they are built by hand: what comes twice, and how many a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final, Protocol

import psycopg

from benchmarks.report import Section, Table
from benchmarks.schemes import version_of
from shardids.compare.multimaster.mariadb import Login
from shardids.compare.schemes.scheme import library
from shardids.compare.testbed.servers import temporary_redis
from shardids.pg.embedded import temporary_server
from shardids.testing.devcluster import create_cluster

CLIENTS: Final = 16
EACH: Final = 50
LEASE: Final = 100
TTL_S: Final = 2 * 86_400
"""A key a day: nobody asks for it after two."""
PERSISTENT: Final = {"appendonly": "yes", "appendfsync": "everysec"}
LEASES: Final = """
    create table leases (key text primary key, leased bigint not null)"""
_INCR: Final = """
    local number = redis.call('INCR', KEYS[1])
    if number == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
    return number"""
_INCR_IN_LEASE: Final = """
    local last = redis.call('GET', KEYS[2])
    if not last then return false end
    local number = redis.call('INCR', KEYS[1])
    if number > tonumber(last) then return false end
    return number"""
_KEEP_LEASE: Final = """
    local last = tonumber(redis.call('GET', KEYS[2]) or '0')
    if tonumber(ARGV[1]) > last then
      redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
      redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
    end"""


class Numbers(Protocol):
    """What draws numbers; one for each client."""

    def draw(self, key: str) -> int:
        """Return the next number."""
        ...


class ReadThenSet:
    """GET, add one, SET: what is written first, and what gives numbers twice."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    def draw(self, key: str) -> int:
        """Return the next number, or another's."""
        number = int(self._redis.get(key) or 0) + 1
        self._redis.set(key, number, ex=TTL_S)
        return number


class Incr:
    """INCR and EXPIRE in one pipeline."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    def draw(self, key: str) -> int:
        """Return the next number."""
        with self._redis.pipeline(transaction=False) as pipeline:
            number, _ = pipeline.incr(key).expire(key, TTL_S).execute()
        return int(number)


class Scripted:
    """INCR and, for the first number, EXPIRE by a Lua script: never a key without its end."""

    def __init__(self, redis: Any) -> None:
        self._draw = redis.register_script(_INCR)

    def draw(self, key: str) -> int:
        """Return the next number."""
        return int(self._draw(keys=[key], args=[TTL_S]))


class Leased:
    """Numbers of ranges that PostgreSQL leases to one incarnation of Redis; from PostgreSQL where it is gone.

    A range is committed in PostgreSQL before Redis may issue from it, and its key has the ``run_id`` of the
    server: one that comes back with an old snapshot, or a replica that was promoted, has no range and gets
    another. So no number comes twice, whatever Redis lost; what is left of a range is missing.
    """

    def __init__(self, redis: Any, connection: psycopg.Connection[Any]) -> None:
        self._redis, self._connection = redis, connection
        self._error: type[Exception] = library("redis").exceptions.RedisError
        self._draw = self._redis.register_script(_INCR_IN_LEASE)
        self._keep = self._redis.register_script(_KEEP_LEASE)
        self._run_id = ""

    def draw(self, key: str) -> int:
        """Return the next number."""
        try:
            return self._draw_from_redis(key)
        except self._error:
            self._run_id = ""
            return self._lease(key, 1)[0]

    def _draw_from_redis(self, key: str) -> int:
        while True:
            self._run_id = self._run_id or str(self._redis.info("server")["run_id"])
            keys = [f"{key}:{self._run_id}:number", f"{key}:{self._run_id}:last"]
            number = self._draw(keys=keys)
            if number is not None:
                return int(number)
            first, last = self._lease(key, LEASE)
            self._keep(keys=keys, args=[first - 1, last, TTL_S])

    def _lease(self, key: str, count: int) -> tuple[int, int]:
        row = self._connection.execute(
            "insert into leases values (%(key)s, %(count)s) on conflict (key)"
            " do update set leased = leases.leased + excluded.leased returning leased",
            {"key": key, "count": count},
        ).fetchone()
        assert row is not None
        return int(row[0]) - count + 1, int(row[0])


class InPostgresql:
    """``next_number`` of a kind; its connection commits each statement."""

    def __init__(self, connection: psycopg.Connection[Any], kind: str) -> None:
        self._connection, self._kind = connection, kind

    def draw(self, key: str) -> int:
        """Return the next number."""
        row = self._connection.execute("select shard_0000.next_number(%s, %s)", (key, self._kind)).fetchone()
        assert row is not None
        return int(str(row[0]).rpartition("-")[2])


def client_of(login: Login) -> Any:
    """A client that does not try again, to be closed: another try may draw another number."""
    redis: Any = library("redis")
    return redis.Redis(
        login.host, login.port, username=login.user, password=login.password, socket_timeout=5, retry=None
    )


def draw_at_once(sources: list[Numbers], key: str, each: int = EACH) -> list[int]:
    """All sources draw at once, a thread each."""

    def draw(source: Numbers) -> list[int]:
        return [source.draw(key) for _ in range(each)]

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(chain.from_iterable(pool.map(draw, sources)))


def run(rounds: int) -> Section:
    """Draw from each; nothing else is done with the numbers."""
    with ExitStack() as stack:
        login = stack.enter_context(temporary_redis(PERSISTENT)).login
        server = stack.enter_context(temporary_server(settings={"fsync": "on"}))
        create_cluster([server], 1)

        def connected() -> psycopg.Connection[Any]:
            return stack.enter_context(psycopg.connect(server.url(), autocommit=True))

        def client() -> Any:
            return stack.enter_context(client_of(login))

        first = connected()
        first.execute(LEASES.encode())
        first.execute(
            "select shardids.define_counter(0, 'gapless', 'day', padding => 9),"
            " shardids.define_counter(0, 'quick', 'day', padding => 9, lanes => 32)"
        )
        makers: Mapping[str, Callable[[], Numbers]] = {
            "Redis, GET and SET": lambda: ReadThenSet(client()),
            "Redis, INCR and EXPIRE": lambda: Incr(client()),
            "Redis, Lua": lambda: Scripted(client()),
            "Redis, ranges leased from PostgreSQL": lambda: Leased(client(), connected()),
            "gapless": lambda: InPostgresql(connected(), "gapless"),
            "quick": lambda: InPostgresql(connected(), "quick"),
        }
        rows = dict(_measured(makers, rounds))
        version = version_of(first)
    return Section(
        title="Numbers for people, and Redis",
        conditions=f"PostgreSQL {version}, fsync on; Redis with appendfsync everysec; {CLIENTS} threads of"
        f" one Python draw {EACH} numbers each of one tenant and day, and do nothing else with them;"
        f" {rounds} rounds.",
        table=Table(columns=("numbers/s", f"twice, of {CLIENTS * EACH * rounds:,}"), rows=rows),
    )


def _measured(
    makers: Mapping[str, Callable[[], Numbers]], rounds: int
) -> Iterator[tuple[str, tuple[float, ...]]]:
    for name, make in makers.items():
        sources = [make() for _ in range(CLIENTS)]
        key = f"{name}:2026-11-22"
        for source in sources:
            source.draw(f"{key}:warm")
        begun = time.perf_counter()
        drawn = [number for _ in range(rounds) for number in draw_at_once(sources, key)]
        taken = time.perf_counter() - begun
        yield name, (len(drawn) / taken, len(drawn) - len(set(drawn)))
