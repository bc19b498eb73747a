"""Settings of a role or a database change nothing that shardids' own sessions read or write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Cluster, mover
from shardids.catalog.topology import schema_name
from shardids.pg.connections import open_engine
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.tables import references
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.clusters import command_here as command
from tests.support.referring import database

SETTINGS = {
    "datestyle": "SQL, DMY",
    "intervalstyle": "sql_standard",
    "extra_float_digits": "-2",
    "default_transaction_isolation": "serializable",
}
VALUES = """
    select name, day - date '2000-01-01', extract(epoch from every), weight = 0.1::float8 + 0.2,
           at = make_timestamptz(2026, 3, 4, 5, 6, 0, 'UTC')
    from shardids_ref.rates"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="module")
def urls(server: EmbeddedServer) -> dict[str, URL]:
    """Nodes a, where the settings are others than usual, and b; the catalog is on a."""
    urls = {name: database(server, f"node_{name}") for name in "ab"}
    with connected(urls["a"]) as connection:
        for name, value in SETTINGS.items():
            connection.execute(f"alter database node_a set {name} = '{value}'")
    return urls


def test_times_in_another_style_are_read(urls: dict[str, URL]) -> None:
    found_cluster(urls["a"], urls, 4)
    environment = {"SHARDIDS_CATALOG": dsn(urls["a"])}
    for arguments in ("shard move 0 --to b", "shard move --list", "shard list", "node list", "doctor --json"):
        done = command(*arguments.split(), **environment)
        assert done.returncode in (0, 3), done.stderr
    with Cluster.connect(dsn(urls["a"])) as cluster:
        assert cluster.node_of(0).name == "b"
    with catalog_at(urls["a"]) as catalog:
        assert [one.outcome for one in mover.all_moves(catalog)] == ["moved"]


def test_reference_rows_mean_the_same_on_all_nodes(urls: dict[str, URL]) -> None:
    found_cluster(urls["a"], urls, 4)
    nodes = {name: psycopg.connect(dsn(url), autocommit=True) for name, url in urls.items()}
    try:
        for connection in nodes.values():
            connection.execute(
                """create table shardids_ref.rates (
                     name text primary key, day date, every interval, weight float8, at timestamptz)"""
            )
        nodes["a"].execute(
            """insert into shardids_ref.rates values
               ('one', make_date(2026, 3, 4), make_interval(days => -1, hours => -2), 0.1::float8 + 0.2,
                make_timestamptz(2026, 3, 4, 5, 6, 0, 'UTC'))"""
        )
        with catalog_at(urls["a"]) as catalog:
            references.create_table(catalog, "rates", writer="a")
        there, here = (nodes[name].execute(VALUES).fetchall() for name in "ab")
        assert here == there
    finally:
        for connection in nodes.values():
            connection.close()


@pytest.mark.long
def test_timeouts_of_the_database_end_no_move(server: EmbeddedServer) -> None:
    urls = {name: database(server, f"hurried_{name}") for name in "ab"}
    found_cluster(urls["a"], urls, 4)
    with catalog_at(urls["a"]) as catalog:
        shard = min(shard for shard, node in catalog.placement().node_of.items() if node == "a")
        schema = schema_name("shard_", shard)
    with connected(urls["a"]) as source:
        source.execute(f"create table {schema}.notes (id bigint primary key, body text)")
        source.execute(f"insert into {schema}.notes select g, repeat('x', 200) from generate_series(1, 99) g")
    set_timeouts(urls, "'200ms'")
    environment = {"SHARDIDS_CATALOG": dsn(urls["a"])}
    move = f"shard move {shard} --to b"
    refused = command(*move.split(), **environment)
    assert refused.returncode == 1
    assert 'node "a" ends what lasts longer than statement_timeout' in refused.stderr
    remedies = re.findall("alter role .* = 0", refused.stderr)
    assert any("hurried_a set statement_timeout" in remedy for remedy in remedies)
    with connected(urls["a"]) as source:
        for remedy in remedies:
            source.execute(remedy)
    with connected(urls["a"]) as source:
        # Larger than what is read in 200 ms by all the steps of a move.
        source.execute(
            f"insert into {schema}.notes select g, repeat('x', 200) from generate_series(100, 400000) g"
        )
    done = command(*move.split(), "--verify", **environment)
    assert done.returncode == 0, done.stderr
    with Cluster.connect(dsn(urls["a"])) as cluster:
        assert cluster.node_of(shard).name == "b"


def test_administrative_sessions_have_no_timeouts(server: EmbeddedServer) -> None:
    url = database(server, "hurried")
    set_timeouts({"a": url}, "'100ms'")
    engine = open_engine(url, what="it", administrative=True)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("select pg_sleep(0.3)")
            connection.exec_driver_sql("select pg_sleep(0)")
    finally:
        engine.dispose()


def set_timeouts(urls: Mapping[str, URL], value: str) -> None:
    """Sets for the databases both timeouts that end what is running."""
    for url in urls.values():
        with connected(url) as connection:
            known = connection.execute(
                "select name from pg_settings where name in ('statement_timeout', 'transaction_timeout')"
            ).fetchall()
            for (name,) in known:
                connection.execute(f"alter database {url.database} set {name} = {value}")
