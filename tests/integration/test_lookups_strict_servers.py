"""Strict look-ups on servers of their own: one that is down, passwords, and roles that are no superusers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import lookups, mover
from shardids.catalog.lookups import shard_of_claim
from shardids.catalog.rows import Catalog
from shardids.catalog.urls import parse_url
from shardids.dev.embedded import EmbeddedServer, temporary_servers
from shardids.errors import ConnectionFailed, MissingPrivilege
from shardids.lookups.places import PartlyTold, faulty_nodes
from tests.conftest import dsn
from tests.support.clusters import catalog_at
from tests.support.signups import EMAIL, open_signups

SHARDS = 6
SETTINGS = {"wal_level": "logical", "shared_preload_libraries": "pg_stat_statements"}


@pytest.fixture(scope="module")
def servers() -> Iterator[Sequence[EmbeddedServer]]:
    with temporary_servers(3, settings=SETTINGS) as there:
        yield there


@contextmanager
def strict(urls: dict[str, URL]) -> Iterator[Catalog]:
    open_signups(urls["a"], urls, SHARDS)
    with catalog_at(urls["a"]) as catalog:
        lookups.create(catalog, EMAIL, strict=True, store_password=True)
        yield catalog


def database(server: EmbeddedServer, name: str, owner: str | None = None) -> URL:
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute(f"create database {name}" + (f" owner {owner}" if owner else ""))
    return parse_url(server.url()).set(database=name)


def test_a_superuser_makes_dblink_for_a_role_that_is_none(servers: Sequence[EmbeddedServer]) -> None:
    supers, urls = {}, {}
    for node, server in zip("ab", servers, strict=False):
        with psycopg.connect(server.url(), autocommit=True) as db:
            db.execute("create role manager login password 'secret' createdb createrole replication")
        supers[node] = database(server, "managed", "manager")
        urls[node] = supers[node].set(username="manager", password="secret")
    open_signups(urls["a"], urls, SHARDS)
    with catalog_at(urls["a"]) as catalog:
        for node in "ab":
            with pytest.raises(MissingPrivilege, match="need extension dblink") as refused:
                lookups.create(catalog, EMAIL, strict=True, store_password=True)
            prefix, _, statements = str(refused.value.hint).partition(": ")
            assert prefix == "A superuser runs, in this database"
            with psycopg.connect(dsn(supers[node])) as db:
                db.execute(statements)
        lookups.create(catalog, EMAIL, strict=True, store_password=True)
        lookups.backfill(catalog, EMAIL)
        assert faulty_nodes(catalog) == {}
        with psycopg.connect(dsn(urls["a"]), autocommit=True) as db:
            shard = next(s for s, node in catalog.placement().node_of.items() if node == "a")
            db.execute(
                f"insert into shard_{shard:04}.users (name, email) values ('x', 'managed@example.com')"
            )
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="dblink_connect_u"):
                db.execute("select shardids_dblink.dblink_connect_u('one', 'lookups_a')")


def test_passwords_stay_out_of_pg_stat_statements(servers: Sequence[EmbeddedServer]) -> None:
    urls = {node: database(server, "seen") for node, server in zip("ab", servers, strict=False)}
    with psycopg.connect(dsn(urls["a"]), autocommit=True) as db:
        db.execute("create extension pg_stat_statements")
        with strict(urls):
            assert db.execute("select count(*) from pg_user_mappings").fetchone() == (2,)
            asked = db.execute(
                "select count(*) filter (where query ilike '%user mapping%options%'), count(*) > 0"
                " from pg_stat_statements where query not like '%filter%'"
                " and dbid = (select oid from pg_database where datname = current_database())"
            )
            assert asked.fetchone() == (0, True)


@pytest.mark.long
def test_nodes_that_answer_are_told_while_one_is_down(servers: Sequence[EmbeddedServer]) -> None:
    urls = {node: database(server, "down") for node, server in zip("abc", servers, strict=True)}
    with strict(urls) as catalog:
        node_of = catalog.placement().node_of
        mine, moving, here = (
            next(shard for shard, node in node_of.items() if node == one and shard not in used)
            for one, used in (("a", ()), ("b", ()), ("b", (next(s for s in node_of if node_of[s] == "b"),)))
        )
        servers[2].stop()
        moved = mover.move(catalog, moving, "a")
        assert sum("claim where they can" in line for line in moved.stale_views) == 2
        email = next(one for n in range(999) if shard_of_claim(one := f"{n}@x", SHARDS) == moving)
        with psycopg.connect(dsn(urls["b"]), autocommit=True) as db:
            db.execute(f"insert into shard_{here:04}.users (name, email) values ('x', '{email}')")
        with psycopg.connect(dsn(urls["a"]), autocommit=True) as db:
            with pytest.raises(psycopg.errors.UniqueViolation):
                db.execute(f"insert into shard_{mine:04}.users (name, email) values ('x', '{email}')")
            stored = (
                "select count(*) from pg_user_mappings where 'password' = split_part(umoptions[2], '=', 1)"
            )
            assert db.execute(stored).fetchone() == (3,)
            db.execute("delete from shardids.lookup_place")
        assert faulty_nodes(catalog) == {"a": "it does not know where every shard is"}
        failed = lookups.refresh(catalog)
        assert {name: type(error) for name, error in failed.items()} == {
            "a": PartlyTold,
            "b": PartlyTold,
            "c": ConnectionFailed,
        }
        assert faulty_nodes(catalog) == {}
        servers[2].start(attached=True)
        assert lookups.refresh(catalog) == {}
