"""The central counters on MariaDB, Redis and PostgreSQL, and what a lost server issues again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.compare.multimaster.mariadb import connect
from shardids.compare.schemes import Key, Scheme, Servers, redis_counter, scheme_of
from shardids.compare.schemes.blocks import BLOCK, RangeSource
from shardids.compare.schemes.redis_counter import PERSISTENT, RedisSource
from shardids.compare.testbed.servers import (
    MariaDbServer,
    RedisServer,
    temporary_mariadbs,
    temporary_redis,
    temporary_redis_pair,
)
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.pg.embedded import temporary_server
from tests.conftest import dsn

CLIENTS = 6


def at(*servers: MariaDbServer) -> Servers:
    return Servers(mariadb=tuple(server.login for server in servers))


def draw_as_clients(scheme: Scheme, servers: Servers, each: int) -> list[Key]:
    def client(_number: int) -> list[Key]:
        with scheme.open(servers) as source:
            return [*(source.draw() for _ in range(each)), *source.draw_many(each), *source.draw_many(each)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [key for keys in pool.map(client, range(CLIENTS)) for key in keys]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[MariaDbServer]]:
    """Two ticket servers, odd and even."""
    with temporary_mariadbs(scheme_of("tickets").about.needs.mariadb) as servers:
        scheme_of("tickets").install(at(*servers))
        scheme_of("tickets").install(at(*servers))
        yield servers


def test_tickets_come_from_both_servers_once(pair: list[MariaDbServer]) -> None:
    keys = draw_as_clients(scheme_of("tickets"), at(*pair), 100)
    assert len(set(keys)) == len(keys) == CLIENTS * 300
    assert abs(sum(1 if key % 2 else -1 for key in keys if isinstance(key, int))) <= CLIENTS
    for offset, server in zip((1, 2), pair, strict=True):
        connection = connect(server.login, "shardids_baselines")
        with connection, connection.cursor() as cursor:
            cursor.execute("select id % 2, count(*) from Tickets64")
            assert cursor.fetchone() == (offset % 2, 1)


def test_tickets_go_on_with_one_server_and_stop_without(pair: list[MariaDbServer]) -> None:
    with scheme_of("tickets").open(at(*pair)) as source:
        before = {source.draw() for _ in range(50)}
        pair[0].kill()
        began = time.monotonic()
        alone = {*(source.draw() for _ in range(25)), *source.draw_many(25)}
        assert time.monotonic() - began < 10
        assert {key % 2 for key in alone if isinstance(key, int)} == {0}
        pair[1].kill()
        with pytest.raises(ConnectionFailed, match="no ticket server answers"):
            source.draw()
        for server in pair:
            server.start()
        time.sleep(1.1)
        after = {source.draw() for _ in range(50)}
    assert len(before | alone | after) == 150
    assert {key % 2 for key in after if isinstance(key, int)} == {0, 1}


def test_a_ticket_server_that_lost_its_table_issues_all_again(pair: list[MariaDbServer]) -> None:
    tickets = scheme_of("tickets")
    with tickets.open(at(*pair)) as source:
        for _ in range(10):
            source.draw()
    with connect(pair[0].login) as connection, connection.cursor() as cursor:
        cursor.execute("drop table shardids_baselines.Tickets64")
    tickets.install(at(*pair))
    with tickets.open(at(*pair)) as source:
        drawn = [source.draw() for _ in range(10)]
        again = [key for key in drawn if isinstance(key, int) and key % 2]
    assert set(again) <= {3, 5, 7, 9, 11, 13}


def test_tickets_refuse_servers_without_offsets(pair: list[MariaDbServer]) -> None:
    with pytest.raises(ClusterConflict, match="auto_increment_offset 2, not 2 and 1"):
        scheme_of("tickets").install(at(pair[1], pair[0]))


def test_a_batch_of_tickets_is_one_statement(pair: list[MariaDbServer]) -> None:
    with scheme_of("tickets").open(at(*pair)) as source:
        before = replaced(pair)
        keys = source.draw_many(2500)
    assert replaced(pair) - before == 3
    assert len(set(keys)) == 2500
    for batch in (keys[:1000], keys[1000:2000], keys[2000:]):
        assert list(batch) == [*range(int(batch[0]), int(batch[0]) + 2 * len(batch), 2)]


def replaced(pair: list[MariaDbServer]) -> int:
    """How many REPLACE statements both servers have run."""
    counts = []
    for server in pair:
        with connect(server.login) as connection, connection.cursor() as cursor:
            cursor.execute("show global status like 'Com_replace'")
            counts.append(int(cursor.fetchone()[1]))
    return sum(counts)


def test_offsets_of_mariadb_number_rows_of_two_masters(pair: list[MariaDbServer]) -> None:
    offsets = scheme_of("offsets-mariadb")
    offsets.install(at(*pair))
    offsets.install(at(*pair))
    offsets.install_shards(at(*pair), 3)

    def client(number: int) -> list[Key]:
        with offsets.open(at(*pair), number % 2) as source:
            keys = [source.draw(), *source.draw_many(1500), source.draw()]
        assert {key % 2 for key in keys if isinstance(key, int)} == {1 - number % 2}
        return keys

    with ThreadPoolExecutor(CLIENTS) as pool:
        keys = [key for keys in pool.map(client, range(CLIENTS)) for key in keys]
    assert len(set(keys)) == len(keys) == CLIENTS * 1502
    with connect(pair[0].login, "shardids_baselines") as connection, connection.cursor() as cursor:
        cursor.execute("select count(*), min(id % 2) from row_0")
        assert cursor.fetchone() == (CLIENTS // 2 * 1502, 1)
    with offsets.open(at(*pair)) as source:
        assert [source.draw_for(2) for _ in range(2)] == [1, 3]
        pair[0].kill()
        with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{pair[0].login.port}"):
            source.draw()
    pair[0].start()


def take(server: RedisServer, count: int) -> list[Key]:
    with scheme_of("redis").open(Servers(redis=(server.login,))) as source:
        return [*(source.draw() for _ in range(count)), *source.draw_many(count)]


def test_redis_counts_and_hands_out_blocks() -> None:
    with temporary_redis(*scheme_of("redis").about.needs.redis) as server:
        servers = Servers(redis=(server.login,))
        keys = draw_as_clients(scheme_of("redis"), servers, 300)
        assert sorted(keys) == list(range(1, CLIENTS * 900 + 1))
        blocks = draw_as_clients(scheme_of("redis-blocks"), servers, 700)
        assert len({*keys, *blocks}) == CLIENTS * 3000
        with scheme_of("redis-blocks").open(servers) as source:
            source.draw()
            server.kill()
            # What is left of the block, and then nothing.
            for _ in range(999):
                source.draw()
            with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{server.login.port}"):
                source.draw()
        with pytest.raises(ConnectionFailed):
            scheme_of("redis").open(servers)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({}, 100),  # in memory only: all that was issued
        ({"save": "3600 1"}, 60),  # what came after the last snapshot
        ({"appendonly": "yes", "appendfsync": "everysec"}, 0),  # the log's tail is the system's by then
        ({"appendonly": "yes", "appendfsync": "always"}, 0),
    ],
)
def test_what_a_killed_redis_issues_again(settings: dict[str, str], again: int) -> None:
    with temporary_redis(settings) as server:
        first = take(server, 20)
        if "save" in settings:
            with_client(server, lambda client: client.save())
        first += take(server, 30)
        assert first == list(range(1, 101))
        server.kill()
        server.start()
        second = take(server, 100)
        assert second[0] == 101 - again
        assert len(set(first) & set(second)) == again


def with_client(server: RedisServer, work: Callable[..., object]) -> None:
    with server.client() as client:
        work(client)


def test_a_promoted_replica_issues_again_what_it_had_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without WAIT a draw does not ask the replica; with it, what the replica lacks is not given out."""
    monkeypatch.setattr(redis_counter, "CONFIRMED_MS", 3_000)  # a busy disk may keep the replica for a second
    with temporary_redis_pair(PERSISTENT) as pair:
        servers = Servers(redis_pair=pair.logins)
        with scheme_of("redis-wait").open(servers) as source, RedisSource(pair.primary.login) as hasty:
            confirmed = [*(source.draw() for _ in range(20)), *source.draw_many(30)]
            pair.hold_up()
            unconfirmed = [hasty.draw() for _ in range(40)]
            with pytest.raises(ConnectionFailed, match="no replica of Redis has confirmed"):
                source.draw()
            pair.fail_over()
            with pytest.raises(ConnectionFailed):
                source.draw()
        with scheme_of("redis-wait").open(servers) as source:
            after = source.draw_many(100)
            pair.replica.kill()
            with pytest.raises(ConnectionFailed, match="no replica of Redis has confirmed"):
                source.draw()
            pair.primary.kill()
            with pytest.raises(ConnectionFailed, match="no Redis server of the pair is a primary"):
                scheme_of("redis-wait").open(servers)
    assert confirmed == [*range(1, 51)]
    assert unconfirmed == [*range(51, 91)]
    assert after == [*range(51, 151)]


@pytest.fixture
def ranges(blank_database: Callable[[], URL]) -> str:
    url = dsn(blank_database())
    scheme_of("ranges").install(Servers(postgresql=(url,)))
    return url


def test_a_refill_never_stalls_a_draw(ranges: str) -> None:
    with (
        RangeSource(ranges) as source,
        psycopg.connect(ranges) as other,
    ):
        drawn = [source.draw() for _ in range(BLOCK)]
        time.sleep(0.2)
        # The table is locked from now on: the range that was fetched ahead still comes at once.
        other.execute("lock table shardids_baselines.key_range")
        drawn += [source.draw() for _ in range(BLOCK)]
        assert source.stalls == 0
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(source.draw)
            time.sleep(0.2)
            assert not waiting.done()
            other.rollback()
            drawn.append(waiting.result(10))
        assert source.stalls == 1
        drawn += source.draw_many(BLOCK * 5)
        drawn += source.draw_many(BLOCK // 2)
        assert len(set(drawn)) == len(drawn)


def test_ranges_outlive_a_crash_of_their_server() -> None:
    with temporary_server() as server:
        servers = Servers(postgresql=(server.url(),))
        scheme_of("ranges").install(servers)
        with scheme_of("ranges").open(servers) as source:
            drawn = {source.draw()}
            time.sleep(0.2)
            server.kill()
            drawn |= {source.draw() for _ in range(2 * BLOCK - 1)}
            with pytest.raises(ConnectionFailed):
                source.draw()
        server.start(attached=True)
        with scheme_of("ranges").open(servers) as source:
            again = set(source.draw_many(3 * BLOCK))
    assert len(drawn) == 2 * BLOCK
    assert not drawn & again
