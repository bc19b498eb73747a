"""The schemes that draw from PostgreSQL or in the process: the interface, and what each promises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids.compare.schemes import SCHEMES, Key, KeyColumn, Scheme, Servers, scheme_of
from shardids.compare.schemes.uuids import FlakeSource
from shardids.compare.testbed.servers import temporary_id_service
from shardids.errors import (
    BadArgument,
    ClockMovedBack,
    ConnectionFailed,
    MissingLibrary,
    ServerStartFailed,
    UnsupportedServer,
)
from shardids.pg import sqlfiles
from tests.conftest import dsn
from tests.support.fake_clock import FakeClock

CLIENTS = 6
DRAWS = 300
BLOCK = 5000
ONE_SERVER = [
    name
    for name, scheme in SCHEMES.items()
    if (scheme.about.needs.postgresql == 1 and not scheme.about.needs.id_service)
    or not scheme.about.needs.any
]


@pytest.fixture
def servers(blank_database: Callable[[], URL]) -> Servers:
    return Servers(postgresql=(dsn(blank_database()),))


@pytest.fixture
def installed(servers: Servers, request: pytest.FixtureRequest) -> Scheme:
    """The scheme of the parameter, installed twice; skips what the server is too old for."""
    scheme = scheme_of(request.param)
    if not is_supported(servers, scheme):
        with pytest.raises(UnsupportedServer, match=f"needs {scheme.about.needs.oldest_postgresql}"):
            scheme.install(servers)
        pytest.skip("this PostgreSQL lacks it, and says so")
    scheme.install(servers)
    scheme.install(servers)
    return scheme


def is_supported(servers: Servers, scheme: Scheme) -> bool:
    with psycopg.connect(servers.postgresql[0]) as connection:
        return connection.info.server_version // 10000 >= scheme.about.needs.oldest_postgresql


def draw_as_clients(scheme: Scheme, servers: Servers) -> list[list[Key]]:
    """Single draws of several clients at once, with a block amid them."""

    def client(_number: int) -> list[Key]:
        with scheme.open(servers) as source:
            keys = [source.draw() for _ in range(DRAWS)]
            keys += source.draw_many(BLOCK)
            return [*keys, source.draw()]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(client, range(CLIENTS)))


@pytest.mark.parametrize("installed", [n for n in ONE_SERVER if n != "published"], indirect=True)
def test_several_clients_draw_each_key_once(installed: Scheme, servers: Servers) -> None:
    began = datetime.now(UTC)
    drawn = draw_as_clients(installed, servers)
    ended = datetime.now(UTC)
    keys = [key for client in drawn for key in client]
    assert len(keys) == CLIENTS * (DRAWS + BLOCK + 1)
    assert len(set(keys)) == len(keys)
    expected: type = UUID if installed.column().type == "uuid" else int
    assert {type(key) for key in keys} == {expected}
    decoded = [installed.decode(key) for key in keys[::50]]
    times = [one.time for one in decoded if one and one.time]
    if installed.about.tells.startswith("time"):
        assert len(times) == len(decoded)
        # IDs of shardids run ahead of the clock at full speed; those of the others never do.
        ahead = timedelta(seconds=1 if installed.about.name.startswith("shardids") else 0.002)
        assert began - timedelta(milliseconds=2) < min(times) <= max(times) < ended + ahead
    else:
        assert times == []


@pytest.mark.parametrize("installed", ONE_SERVER, indirect=True)
def test_a_table_takes_the_keys(installed: Scheme, servers: Servers) -> None:
    column = installed.column()
    with psycopg.connect(servers.postgresql[0], autocommit=True) as connection:
        connection.execute(column.table(sql.Identifier("taken"), "note text"))
        if column.by_server:
            connection.execute("insert into taken (note) select 'x' from generate_series(1, 500)")
        else:
            with installed.open(servers) as source, connection.cursor() as cursor:
                cursor.executemany(
                    "insert into taken values (%s, 'x')", [(k,) for k in source.draw_many(500)]
                )
        keys = connection.execute("select id from taken").fetchall()
    assert len(keys) == 500


def test_the_published_function_repeats_itself_within_a_millisecond(servers: Servers) -> None:
    scheme = scheme_of("published")
    scheme.install(servers)
    again = b"""select published.next_id(), (select count(nextval('published.table_id_seq'))
                from generate_series(1, 1023)), published.next_id()"""
    with psycopg.connect(servers.postgresql[0], autocommit=True) as connection:
        rows = [connection.execute(again).fetchone() for _ in range(300)]
    assert any(row and row[0] == row[2] for row in rows)
    with scheme.open(servers) as source:
        decoded = scheme.decode(source.draw())
    assert decoded
    assert decoded.origin == 0


def test_nodes_share_no_key(blank_database: Callable[[], URL]) -> None:
    servers = Servers(postgresql=(dsn(blank_database()), dsn(blank_database())))
    for name in ("shardids", "shardids-blocks", "published"):
        scheme = scheme_of(name)
        scheme.install(servers)
        for node in range(2):
            with scheme.open(servers, node) as source:
                decoded = [scheme.decode(key) for key in source.draw_many(10)]
            assert {one.origin for one in decoded if one} == {node}
    for name in ONE_SERVER:
        scheme = scheme_of(name)
        if name == "published" or not is_supported(servers, scheme):
            continue
        scheme.install(servers)
        with scheme.open(servers, 0) as one, scheme.open(servers, 1) as other:
            keys = [*one.draw_many(100), *other.draw_many(100), one.draw(), other.draw()]
        assert len(set(keys)) == 202, name
    # Only the first server has the one counter.
    assert [scheme_of("sequence").column(node).by_server for node in range(2)] == [True, False]
    assert [scheme_of("identity").column(node).by_server for node in range(2)] == [True, False]
    assert [scheme_of("counter").column(node).by_server for node in range(2)] == [True, False]


def test_offsets_keep_masters_apart(blank_database: Callable[[], URL]) -> None:
    servers = Servers(postgresql=tuple(dsn(blank_database()) for _ in range(3)))
    offsets = scheme_of("offsets")
    with pytest.raises(BadArgument, match="offsets needs 2 PostgreSQL servers, not 1"):
        offsets.install(Servers(postgresql=servers.postgresql[:1]))
    offsets.install(servers)
    offsets.install(servers)
    drawn = []
    for node in range(3):
        with offsets.open(servers, node) as source:
            keys = [source.draw(), *source.draw_many(1000)]
        assert {key % 3 for key in keys if isinstance(key, int)} == {(node + 1) % 3}
        drawn += keys
    assert len(set(drawn)) == 3003


@pytest.mark.parametrize("name", ["shardids", "lamport", "hlc"])
def test_keys_sort_after_those_that_a_node_is_told(name: str, blank_database: Callable[[], URL]) -> None:
    two = Servers(postgresql=(dsn(blank_database()), dsn(blank_database())))
    scheme = scheme_of(name)
    assert scheme.hears
    scheme.install(two)
    with scheme.open(two, 0) as here, scheme.open(two, 1) as there:
        ahead = int(here.draw_many(1000)[-1]) + (30_000 << 22)
        latest: Key = ahead
        for number in range(20):
            key = (here, there)[number % 2].draw_after(latest)
            assert latest < key
            decoded = scheme.decode(key)
            assert decoded is not None
            assert decoded.origin == number % 2
            latest = key
        # Never back, and no further ahead than a millisecond an answer.
        assert latest < there.draw() < ahead + (22 << 22)
        with psycopg.connect(two.postgresql[0]) as connection:
            locks = connection.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone()
    assert locks == (0,)


def test_only_schemes_that_hear_are_told(servers: Servers) -> None:
    with scheme_of("uuid4").open(servers) as source, pytest.raises(NotImplementedError):
        source.draw_after(1)


def test_uuids_tell_what_their_versions_hold() -> None:
    for name, version in (("uuid1", 1), ("uuid6", 6), ("uuid7-client", 7), ("uuid4-client", 4)):
        scheme = scheme_of(name)
        with scheme.open(Servers()) as source:
            keys = source.draw_many(1000)
        assert {key.version for key in keys if isinstance(key, UUID)} == {version}
        decoded = [scheme.decode(key) for key in keys]
        if version == 4:
            assert set(decoded) == {None}
            continue
        times = [one.time for one in decoded if one and one.time]
        assert times == sorted(times)
        if version > 1:
            assert keys == sorted(keys, key=lambda key: key.int if isinstance(key, UUID) else key)
        with pytest.raises(BadArgument, match="128 bits"):
            scheme.decode(7)
    with pytest.raises(BadArgument, match="integers"):
        scheme_of("shardids").decode(UUID(int=7))


def test_ulids_sort_within_a_client() -> None:
    with scheme_of("ulid").open(Servers()) as source:
        keys = source.draw_many(10_000)
    assert keys == sorted(keys, key=lambda key: key.int if isinstance(key, UUID) else key)


def test_a_flake_waits_for_the_next_millisecond_and_refuses_a_clock_that_went_back() -> None:
    clock = FakeClock(ms=1_000_000)
    source = FlakeSource(node=5, clock=clock)
    keys = source.draw_many(1 << 16)
    assert clock.slept_s == 0
    keys.append(source.draw())
    assert clock.slept_s > 0
    assert len(set(keys)) == len(keys)
    assert keys == sorted(keys, key=lambda key: key.int if isinstance(key, UUID) else key)
    scheme = scheme_of("flake128")
    last, first = scheme.decode(keys[-1]), scheme.decode(keys[0])
    assert first
    assert last
    assert first.time == datetime.fromtimestamp(1000, UTC)
    assert (first.origin, first.sequence, last.sequence) == (5, 0, 0)
    clock.ms -= 250
    with pytest.raises(ClockMovedBack, match="went back by"):
        source.draw()
    clock.ms += 250
    assert source.draw() not in keys


def test_refusals(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArgument, match="scheme 'uuid9' does not exist") as unknown:
        scheme_of("uuid9")
    assert "uuid7-client" in unknown.value.hint
    with pytest.raises(BadArgument, match="sequence needs 1 PostgreSQL servers, not 0"):
        scheme_of("sequence").install(Servers())
    with pytest.raises(BadArgument, match="redis needs 1 Redis servers, not 0"):
        scheme_of("redis").open(servers)
    with pytest.raises(BadArgument, match="no node 1: the servers are 0 to 0"):
        scheme_of("sequence").open(servers, 1)
    sequence = scheme_of("sequence")
    sequence.install(servers)
    with sequence.open(servers) as source:
        for count in (0, -1, 1_000_001, True, 1.5):
            with pytest.raises(BadArgument, match="number of keys"):
                source.draw_many(count)  # type: ignore[arg-type]  # what a caller without mypy may pass
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        sequence.open(Servers(postgresql=("postgresql://nobody@127.0.0.1:1/x",)))
    monkeypatch.setitem(__import__("sys").modules, "ulid", None)
    with pytest.raises(MissingLibrary, match="ulid is not installed") as missing:
        scheme_of("ulid").open(servers)
    assert "shardids[compare]" in missing.value.hint


def test_the_id_service_answers_for_several_clients_and_says_so_when_it_is_gone(servers: Servers) -> None:
    scheme = scheme_of("id-service")
    with pytest.raises(BadArgument, match="id-service needs 1 HTTP servers, not 0"):
        scheme.open(servers)
    scheme_of("shardids").install(servers)
    with temporary_id_service(servers.postgresql[0]) as service:
        served = replace(servers, id_service=(service.login,))
        scheme.install(served)
        keys = [key for client in draw_as_clients(scheme, served) for key in client]
        assert len(set(keys)) == len(keys) == CLIENTS * (DRAWS + BLOCK + 1)
        with scheme.open(served) as source:
            source.draw_many(10_001)
            service.kill()
            with pytest.raises(ConnectionFailed, match=r"the ID service at .* does not answer"):
                source.draw()
    with (
        pytest.raises(ServerStartFailed, match="did not start"),
        temporary_id_service("postgresql://127.0.0.1:1/x"),
    ):
        pass


def test_a_transaction_with_a_counted_row_holds_up_all_others(servers: Servers) -> None:
    """And a rollback leaves no gap."""
    scheme = scheme_of("counter")
    scheme.install(servers)
    insert = "insert into shardids_baselines.counted_row default values returning id"
    with psycopg.connect(servers.postgresql[0]) as open_one, psycopg.connect(servers.postgresql[0]) as other:
        first = open_one.execute(insert).fetchone()
        other.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(insert)
        other.rollback()
        open_one.rollback()
        assert other.execute(insert).fetchone() == first


def test_a_session_that_was_ended_is_a_lost_connection(servers: Servers) -> None:
    sequence = scheme_of("sequence")
    sequence.install(servers)
    with (
        sequence.open(servers) as source,
        psycopg.connect(servers.postgresql[0], autocommit=True) as other,
    ):
        source.draw()
        other.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        with pytest.raises(ConnectionFailed):
            source.draw()


def test_descriptions_are_whole() -> None:
    for name, scheme in SCHEMES.items():
        about = scheme.about
        assert name == about.name
        assert all(
            (about.title, about.safe_under, about.unsafe_under, about.stops, about.tells, about.settings)
        )
    assert "compare/published.v1.sql" in sqlfiles.sql_names()
    assert KeyColumn(type="bigint").by_server is False
