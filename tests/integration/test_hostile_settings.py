"""Settings of a role or a database change nothing that shardids' own sessions read or write."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Cluster, mover, references
from shardids.dev.embedded import temporary_server
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at
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
def urls() -> Iterator[dict[str, URL]]:
    """Nodes a, where the settings are others than usual, and b; the catalog is on a."""
    with temporary_server() as server:
        urls = {name: database(server, f"node_{name}") for name in "ab"}
        with psycopg.connect(dsn(urls["a"]), autocommit=True) as connection:
            for name, value in SETTINGS.items():
                connection.execute(f"alter database node_a set {name} = '{value}'")
        yield urls


def test_times_in_another_style_are_read(urls: dict[str, URL]) -> None:
    found_cluster(urls["a"], urls, 4)
    environment = {"SHARDIDS_CATALOG": dsn(urls["a"])}
    for arguments in ("shard move 0 --to b", "shard moves", "shard list", "node list", "doctor --json"):
        done = command(*arguments.split(), **environment)
        assert done.returncode in (0, 3), done.stderr
    with Cluster.connect(dsn(urls["a"])) as cluster:
        assert cluster.node_of(0).name == "b"
    with catalog_at(urls["a"]) as catalog:
        assert [one.outcome for one in mover.all_moves(catalog)] == ["moved"]


def test_reference_rows_mean_the_same_on_all_nodes(urls: dict[str, URL]) -> None:
    found_cluster(urls["a"], urls, 4)
    connected = {name: psycopg.connect(dsn(url), autocommit=True) for name, url in urls.items()}
    try:
        for connection in connected.values():
            connection.execute(
                """create table shardids_ref.rates (
                     name text primary key, day date, every interval, weight float8, at timestamptz)"""
            )
        connected["a"].execute(
            """insert into shardids_ref.rates values
               ('one', make_date(2026, 3, 4), make_interval(days => -1, hours => -2), 0.1::float8 + 0.2,
                make_timestamptz(2026, 3, 4, 5, 6, 0, 'UTC'))"""
        )
        with catalog_at(urls["a"]) as catalog:
            references.create_table(catalog, "rates", writer="a")
        there, here = (connected[name].execute(VALUES).fetchall() for name in "ab")
        assert here == there
    finally:
        for connection in connected.values():
            connection.close()
