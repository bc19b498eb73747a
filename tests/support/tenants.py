"""Shards with the rows of tenants, and clients that write rows of one of them wherever it lives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count

import psycopg
from sqlalchemy import text

from shardids import tenants
from shardids.catalog.keys.homes import shard_of_key
from shardids.pg.embedded import temporary_servers
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.writing import Threads, Written, change_users

TABLES = """
    create table {s}.tenants (
      id bigint primary key default {s}.next_id(), name text not null unique,
      plan text not null default 'free');
    create table {s}.users (
      id bigint primary key default {s}.next_id(),
      tenant_id bigint not null references {s}.tenants on delete cascade,
      name text not null, shown text generated always as (upper(name)) stored,
      unique (tenant_id, name));
    create table {s}.photos (
      id bigint primary key default {s}.next_id(),
      user_id bigint not null references {s}.users on delete cascade,
      size numeric, body bytea, at timestamptz not null default clock_timestamp());
    create index on {s}.photos (user_id);"""
"""A tenant's rows are one of the root, some direct ones, and some that find it by a path."""

CHOICES = tenants.Choices(root="tenants.name")
QUICK = tenants.Options(settle_s=0.3)
"""Tests' clients are on the same machine."""


def ask(nodes: TwoNodes, shard: int, query: str) -> list[tuple[object, ...]]:
    """Runs statements in a shard, {s} its schema; returns the rows."""
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        cursor = connection.execute(query.replace("{s}", schema(shard)))
        return cursor.fetchall() if cursor.description else []


def abort_open(nodes: TwoNodes) -> None:
    """Undoes the moves of keys that a test has left."""
    for move in tenants.open_key_moves(nodes.catalog):
        tenants.abort(nodes.catalog, move.key, options=QUICK)


def lose_switch(nodes: TwoNodes, key: str) -> None:
    """Makes the catalog one that was restored to a moment while the rows of a key were copied."""
    with nodes.catalog.engine.begin() as connection:
        for statement in (
            f"delete from shardids_catalog.key_home where key = '{key}'",
            f"update shardids_catalog.moved_key set shard = origin where key = '{key}'",
            "update shardids_catalog.key_move set step = 'copy', switched_at = null, rows = null,"
            " ended_at = null, outcome = null, is_unsettled = false, epoch = gen_random_uuid()"
            f" where key = '{key}'",
        ):
            connection.execute(text(statement))


def make_tables(nodes: TwoNodes, shards: int, tables: str = TABLES) -> None:
    """Makes the tables in every shard."""
    for shard in range(shards):
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            connection.execute(tables.replace("{s}", schema(shard)))


@contextmanager
def nodes_with_tables(shards: int, tables: str = TABLES) -> Iterator[TwoNodes]:
    """Two nodes on servers of their own, whose shards have the tables."""
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, shards)
        make_tables(nodes, shards, tables)
        with closing(nodes.catalog):
            yield nodes


def new_tenant(nodes: TwoNodes, name: str, users: int = 20, photos: int = 3) -> int:
    """Enters a tenant with rows in the shard of its name's hash; returns its ID."""
    s = schema(home(nodes, name))
    with (
        nodes.connected(nodes.catalog.node_of(home(nodes, name)).name) as connection,
        connection.transaction(),
    ):
        (tenant,) = connection.execute(
            f"insert into {s}.tenants (name) values (%s) returning id", [name]
        ).fetchone()
        connection.execute(
            f"insert into {s}.users (tenant_id, name) select %s, 'user ' || n from generate_series(1, %s) n",
            [tenant, users],
        )
        connection.execute(
            f"insert into {s}.photos (user_id, size, body) select u.id, n, decode('00ff', 'hex')"
            f" from {s}.users u, generate_series(1, %s) n where u.tenant_id = %s",
            [photos, tenant],
        )
    return int(tenant)


def home(nodes: TwoNodes, name: str) -> int:
    """The shard where a tenant lives."""
    with nodes.catalog.engine.connect() as connection:
        return shard_of_key(connection, "text", name)


def other_shard(nodes: TwoNodes, name: str) -> int:
    """A shard on the other node than the one where a tenant lives."""
    node = nodes.catalog.node_of(home(nodes, name)).name
    return next(shard for shard, there in nodes.catalog.placement().node_of.items() if there != node)


_NUMBERS = count()


def neighbour_in(nodes: TwoNodes, shard: int) -> str:
    """A new name of a tenant whose hash is of a shard."""
    return next(name for name in (f"neighbour {n}" for n in _NUMBERS) if home(nodes, name) == shard)


def rows_of(nodes: TwoNodes, shard: int, tenant: int) -> dict[str, list[tuple[object, ...]]]:
    """The rows of a tenant that are in a shard, by table."""
    s = schema(shard)
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        return {
            name: connection.execute(query, [tenant]).fetchall()
            for name, query in {
                "tenants": f"select * from {s}.tenants where id = %s order by 1",
                "users": f"select * from {s}.users where tenant_id = %s order by 1",
                "photos": f"select p.* from {s}.photos p join {s}.users u on u.id = p.user_id"
                " where u.tenant_id = %s order by 1",
            }.items()
        }


class TenantWriters(Threads[Written]):
    """Threads that insert, update and delete rows of a tenant, and go to its new shard when refused."""

    def __init__(
        self, nodes: TwoNodes, name: str, tenant: int, number: int = 2, every_s: float = 0.0
    ) -> None:
        super().__init__(Written, number, every_s)
        self._nodes, self._name, self._tenant = nodes, name, tenant

    def _run(self, index: int, written: Written) -> None:
        connections: dict[str, psycopg.Connection] = {}
        own: list[int] = []
        turn, last = 0, None
        try:
            shard = home(self._nodes, self._name)
            while not self._stop.is_set():
                turn += 1
                node = self._nodes.catalog.node_of(shard).name
                if node not in connections:
                    connections[node] = psycopg.connect(self._nodes.servers[node].url())
                began = time.monotonic()
                try:
                    with connections[node].transaction():
                        note = change_users(
                            connections[node], schema(shard), index, turn, own, tenant_id=self._tenant
                        )
                    note(written)
                except psycopg.Error as error:
                    written.refusals.add(error.sqlstate)
                    if error.sqlstate != "SI017":
                        raise
                    time.sleep(0.005)
                    shard = home(self._nodes, self._name)
                    continue
                now = time.monotonic()
                written.took_s.append(now - began)
                if last is not None:
                    written.pauses_s.append(now - last)
                last = now
                if self._every_s:
                    self._stop.wait(self._every_s)
        finally:
            for connection in connections.values():
                connection.close()


def assert_once(nodes: TwoNodes, name: str, tenant: int, writers: TenantWriters | None = None) -> int:
    """All rows of a tenant are in its shard and in no other, those that were acknowledged among them."""
    shard = home(nodes, name)
    for other in nodes.catalog.placement().node_of:
        if other != shard:
            assert not any(rows_of(nodes, other, tenant).values()), f"rows of {name} are in shard {other} too"
    there = rows_of(nodes, shard, tenant)
    assert len(there["tenants"]) == 1
    users = {row[0]: row[2] for row in there["users"]}
    photos = {row[0]: row[1] for row in there["photos"]}
    for written in writers.written if writers else ():
        assert written.is_in(users, photos)
    return len(users) + len(photos) + 1
