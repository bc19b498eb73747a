"""Numbers for people from Redis: what the ways to build them lose, and one that loses none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

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
from shardids.compare.testbed.servers import RedisServer, temporary_redis
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


@pytest.fixture
def clients(server: RedisServer) -> Iterator[list[Any]]:
    """As many clients of Redis."""
    with ExitStack() as stack:
        yield [stack.enter_context(client_of(server.login)) for _ in range(CLIENTS)]


def test_reading_and_then_setting_gives_numbers_twice(clients: list[Any]) -> None:
    drawn = draw_at_once([ReadThenSet(client) for client in clients], "read:2026-11-22", 100)
    assert len(set(drawn)) < len(drawn)


@pytest.mark.parametrize("way", [Incr, Scripted])
def test_counting_in_redis_gives_each_once_and_the_key_ends(
    clients: list[Any], way: type[Incr | Scripted]
) -> None:
    key = f"{way.__name__}:2026-11-22"
    drawn = draw_at_once([way(client) for client in clients], key, 50)
    assert sorted(drawn) == list(range(1, 401))
    assert 0 < clients[0].ttl(key) <= 2 * 86_400


def test_a_redis_that_lost_its_data_issues_them_again(clients: list[Any]) -> None:
    source = Scripted(clients[0])
    assert [source.draw("lost:2026-11-22") for _ in range(3)] == [1, 2, 3]
    clients[1].flushall()
    assert source.draw("lost:2026-11-22") == 1


def test_leased_ranges_survive_a_redis_that_is_gone_and_one_that_lost_its_data(
    server: RedisServer, clients: list[Any], connections: list[psycopg.Connection]
) -> None:
    sources = [Leased(*each) for each in zip(clients, connections, strict=True)]
    key = "leased:2026-11-22"
    drawn = draw_at_once(list(sources), key, 50)
    clients[1].flushall()
    drawn += draw_at_once(list(sources), key, 50)
    server.kill()
    # From PostgreSQL alone.
    drawn += draw_at_once(list(sources), key, 10)
    server.start()
    back = draw_at_once(list(sources), key, 50)
    assert len({*drawn, *back}) == len(drawn) + len(back)
