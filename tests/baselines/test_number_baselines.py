"""Numbers for people from Redis: what the ways to build them lose, and one that loses none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy.engine import URL

from benchmarks.redis_numbers import (
    LEASES,
    PERSISTENT,
    Incr,
    Leased,
    ReadThenSet,
    Scripted,
    client_of,
    draw_at_once,
)
from shardids.compare.testbed.redis_servers import RedisServer, temporary_redis
from tests.conftest import dsn

CLIENTS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with temporary_redis(PERSISTENT) as server:
        yield server


@pytest.fixture
def connections(blank_database: Callable[[], URL]) -> Iterator[list[psycopg.Connection]]:
    url = dsn(blank_database())
    made = [psycopg.connect(url, autocommit=True) for _ in range(CLIENTS)]
    made[0].execute(LEASES.encode())
    yield made
    for connection in made:
        connection.close()


def test_reading_and_then_setting_gives_numbers_twice(server: RedisServer) -> None:
    drawn = draw_at_once([ReadThenSet(server.login) for _ in range(CLIENTS)], "read:2026-11-22", 100)
    assert len(set(drawn)) < len(drawn)


@pytest.mark.parametrize("way", [Incr, Scripted])
def test_counting_in_redis_gives_each_once_and_the_key_ends(
    server: RedisServer, way: type[Incr | Scripted]
) -> None:
    key = f"{way.__name__}:2026-11-22"
    drawn = draw_at_once([way(server.login) for _ in range(CLIENTS)], key, 50)
    assert sorted(drawn) == list(range(1, 401))
    assert 0 < client_of(server.login).ttl(key) <= 2 * 86_400


def test_a_redis_that_lost_its_data_issues_them_again(server: RedisServer) -> None:
    source = Scripted(server.login)
    assert [source.draw("lost:2026-11-22") for _ in range(3)] == [1, 2, 3]
    client_of(server.login).flushall()
    assert source.draw("lost:2026-11-22") == 1


def test_leased_ranges_survive_a_redis_that_is_gone_and_one_that_lost_its_data(
    server: RedisServer, connections: list[psycopg.Connection]
) -> None:
    sources = [Leased(server.login, connection) for connection in connections]
    key = "leased:2026-11-22"
    drawn = draw_at_once(list(sources), key, 50)
    client_of(server.login).flushall()
    drawn += draw_at_once(list(sources), key, 50)
    server.kill()
    # From PostgreSQL alone.
    drawn += draw_at_once(list(sources), key, 10)
    server.start()
    back = draw_at_once(list(sources), key, 50)
    assert len({*drawn, *back}) == len(drawn) + len(back)
