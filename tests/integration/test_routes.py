"""The shard of a key and the address of its node, asked of the database."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects.postgresql.psycopg import dialect
from sqlalchemy.engine import URL

from shardids.catalog.topology import shard_for_key
from shardids.pg.urls import parse_url, shown_url
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.generator import refused
from tests.unit.test_topology import VECTORS

Db = psycopg.Connection[Any]
OF_NODE = "select shardids.shard_for_key(%s, %s)"
TYPES = {int: "bigint", str: "text", bytes: "bytea", uuid.UUID: "uuid"}


@pytest.mark.parametrize(("key", "number"), VECTORS, ids=repr)
def test_a_node_knows_the_shard_of_each_key(db: Db, key: object, number: int) -> None:
    for count in (1, 2, 1000, 4096, 65536):
        assert db.execute(OF_NODE, [key, count]).fetchone() == (number % count,)


def test_sql_and_python_agree_on_keys_of_all_types(db: Db) -> None:
    keys = st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        st.binary(),
        st.uuids(),
    )

    @settings(max_examples=200, deadline=None)
    @given(keys, st.integers(1, 65536))
    def agree(key: int | str | bytes | uuid.UUID, count: int) -> None:
        query = f"select shardids.shard_for_key(%s::{TYPES[type(key)]}, %s)"
        found = db.execute(query.encode(), [key, count]).fetchone()
        assert found == (shard_for_key(key, count),)

    agree()


@pytest.mark.parametrize("count", [0, -1, 65537])
def test_a_node_refuses_a_count_that_no_cluster_has(db: Db, count: int) -> None:
    with refused("SI007", "shard_count must be 1 to 65536", str(count)):
        db.execute(OF_NODE, ["ann", count])


def test_a_key_can_be_checked_by_a_constraint(db: Db) -> None:
    db.execute("create table t (name text check (shardids.shard_for_key(name, 8) = 5))")
    names = [f"n{number}" for number in range(50)]
    own = next(name for name in names if shard_for_key(name, 8) == 5)
    other = next(name for name in names if shard_for_key(name, 8) != 5)
    db.execute("insert into t values (%s)", [own])
    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute("insert into t values (%s)", [other])


def test_an_application_finds_node_and_shard_of_a_key_in_the_catalog(
    cluster_url: URL, make_role: MakeRole
) -> None:
    app = make_role("app")
    with connected(cluster_url) as owner:
        # As where functions are not everybody's by default.
        owner.execute("revoke execute on all functions in schema shardids_catalog from public")
        owner.execute("select shardids_catalog.grant_usage(%s)", [app.username])
    with connected(cluster_url.set(username=app.username, password=app.password)) as db:
        for key in ("ann", "", "Grüße", "5"):
            found = db.execute(
                "select shard, schema, node, state, region, host, port, database from shardids_catalog.route"
                " where shard = shardids_catalog.shard_for_key(%s)",
                [key],
            ).fetchone()
            assert found is not None
            shard, schema, node, *rest = found
            assert shard == shard_for_key(key, 8)
            assert (schema, node) == (f"shard_000{shard}", "a" if shard < 4 else "b")
            with catalog_at(cluster_url) as catalog:
                url = parse_url(catalog.placement().nodes[node].url)
            assert rest == ["active", None, url.host, str(url.port), url.database]


def test_a_region_s_shards_are_counted_by_themselves(cluster_url: URL) -> None:
    with connected(cluster_url) as db:
        db.execute("insert into shardids_catalog.region (name, first_shard, last_shard) values ('eu', 2, 6)")
        query = "select shardids_catalog.shard_for_key(%s, %s)"
        for key in ("ann", "bob", "eve"):
            assert db.execute(query, [key, "eu"]).fetchone() == (2 + shard_for_key(key, 5),)
        assert db.execute(query, ["ann", "us"]).fetchone() == (None,)


ADDRESSES = [
    "postgresql://db-a/photos",
    "postgresql://app@10.0.0.11:6432/photos?sslmode=require",
    "postgresql://app@[::1]:5433/photos",
    "postgresql://app@h1,h2/photos",
    "postgresql:///photos?host=a:1&host=b:2",
    "postgresql:///photos?host=a,b&port=1,2",
    "postgresql:///photos?host=/var/run/my%20postgresql",
    "postgresql://app@db-a",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_address_of_a_node_is_taken_apart_as_libpq_does_it(
    blank_database: Callable[[], URL], address: str
) -> None:
    home = blank_database()
    found_cluster(home, {"a": home}, 1)
    url = parse_url(address)
    with connected(home) as db:
        db.execute("update shardids_catalog.node set url = %s", [shown_url(url)])
        found = db.execute("select host, port, database from shardids_catalog.route").fetchone()
    _, wanted = dialect().create_connect_args(url)
    port = str(wanted.get("port", 5432))
    assert found == (wanted["host"], port, wanted.get("dbname", wanted.get("user")))


def test_names_with_special_characters_survive(blank_database: Callable[[], URL]) -> None:
    home = blank_database()
    found_cluster(home, {"a": home}, 1)
    url = URL.create("postgresql", "a@b:/?c d", None, "h", 5, "grüße ?%")
    with connected(home) as db:
        db.execute("update shardids_catalog.node set url = %s", [shown_url(parse_url(dsn(url)))])
        assert db.execute("select host, port, database from shardids_catalog.route").fetchone() == (
            "h",
            "5",
            parse_url(dsn(url)).database,
        )
