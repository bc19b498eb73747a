"""Brings a query node up to date: first each node's views over its shards, then what reads them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare, rows
from shardids.catalog.query_node import QueryNode
from shardids.catalog.rows import Catalog
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.topology import Placement, schema_name
from shardids.errors import ClusterConflict, ShardidsError, StatementFailed
from shardids.views import query_statements, statements
from shardids.views.database import (
    connection_to,
    correct_servers,
    lock,
    run,
    try_servers,
    unused_servers,
    wanted_servers,
)
from shardids.views.query_statements import LOCAL, NODES, PLACEMENT, QUERY, LocalView
from shardids.views.query_tables import QueryTable, choose_tables

_PATIENCE_S: Final = 60.0
"""How long to try to lock the tables. Queries that read them are waited for; new ones wait at most…"""
_ATTEMPT_MS: Final = 300
"""…this long for each attempt."""
_PAUSE_S: Final = 0.2
_LOCK_NOT_AVAILABLE: Final = "55P03"
_LOCALE: Final = ("encoding", "datcollate", "datctype", "datlocprovider", "datlocale", "datcollversion")
"""The columns of ``pg_database`` that say how text is compared, as far as the version has them."""

_Views = Mapping[str, Mapping[str, LocalView]]
"""By table, then by server: what each node is to be read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTable:
    """A table of the query node: a row of ``views/query_state.v1.sql``.

    Attributes:
        name: its name.
        signature: of the columns with which it was created.
        parts: the name of the node's view that each server is read by.
        readers: for the schema of each of its views, the roles that may read it, as SQL.
    """

    name: str
    signature: str
    parts: dict[str, str]
    readers: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the query node has: its tables, and the names of its enum types."""

    tables: tuple[ShownTable, ...]
    enums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """What was done: the statements, without passwords, and a line about each table that is left out."""

    statements: list[str]
    left_out: tuple[str, ...]


def shown_tables(database: Connection) -> Shown:
    """Returns what the query node has, in the open transaction."""
    enums = database.scalars(
        text("""select t.typname from pg_type t join pg_namespace n on n.oid = t.typnamespace
                where n.nspname = :schema and t.typtype = 'e' order by 1"""),
        {"schema": QUERY},
    )
    return Shown(
        tables=tuple(rows(database, read_sql("views/query_state.v1"), ShownTable)), enums=tuple(enums)
    )


def digest_in(database: Connection) -> str | None:
    """Returns the digest of the placement by which the query node reads; ``None`` if it has no views."""
    if database.scalar(text(f"select to_regproc('{QUERY}.{PLACEMENT}') is null")):
        return None
    return str(database.scalar(text(f"select {QUERY}.{PLACEMENT}()")))


def bring_up_to_date(
    catalog: Catalog, there: QueryNode, *, url: str | None, store_password: bool, dry_run: bool
) -> Refreshed:
    """Makes the query node show the shards' tables as they are, each from its owner.

    With ``dry_run`` all is rolled back, and the nodes are not asked for their rows.

    Raises:
        BadArgument, ClusterConflict, MissingPrivilege, StatementFailed: see
            :func:`shardids.views.create_query_node`.
    """
    prefix = catalog.describe().schema_prefix
    with connection_to(catalog, there, url) as database, database.begin() as transaction:
        lock(database, there.where)
        # Reads the placement under the lock, so that the second of two callers has the newer one.
        placement = catalog.placement()
        shown = shown_tables(database)
        with Nodes(placement.nodes, catalog.url) as nodes:
            choice = choose_tables(
                nodes,
                placement,
                sharded=there.sharded,
                reference=there.reference,
                shown=[table.name for table in shown.tables],
            )
            views = _local_views(choice.tables, placement, prefix)
            _require_alike(database, nodes, placement)
            if not dry_run:
                _create_local(nodes, views)
            used = {server for by_server in views.values() for server in by_server}
            servers = wanted_servers(database, nodes, used, placement, store_password=store_password)
            done = (
                run(database, [*statements.extension(), *query_statements.foundation()])
                if not shown.tables
                else []
            )
            done += correct_servers(database, servers)
            done += _change(database, there, choice.tables, views, shown)
            if digest_in(database) != placement.digest():
                done += run(database, [query_statements.placement_function(placement.digest())])
            done += run(database, unused_servers(database))
            if dry_run:
                transaction.rollback()
                return Refreshed(statements=done, left_out=choice.left_out)
            try_servers(database, _trials(views), there.where)
            transaction.commit()
            _drop_unused_local(nodes, views, shown)
    return Refreshed(statements=done, left_out=choice.left_out)


def _local_views(tables: Iterable[QueryTable], placement: Placement, prefix: str) -> _Views:
    by_node = placement.by_node()
    lowest = min(placement.node_of)
    views: dict[str, dict[str, LocalView]] = {}
    for table in tables:
        wanted = {placement.node_of[lowest]: [lowest]} if table.is_reference else by_node
        views[table.name] = {
            statements.server_name(node): LocalView(
                node=node,
                table=table,
                schemas={shard: schema_name(prefix, shard) for shard in shards},
            )
            for node, shards in wanted.items()
        }
    return views


def _of_node(views: _Views, node: str) -> dict[str, LocalView]:
    """Returns a node's views by their own name."""
    return {
        view.name: view for by_server in views.values() for view in by_server.values() if view.node == node
    }


def _locale(connection: Connection) -> dict[str, object]:
    found = connection.scalar(
        text("select to_jsonb(d) from pg_database d where datname = current_database()")
    )
    return {name: found[name] for name in _LOCALE if found and name in found}


def _require_alike(database: Connection, nodes: Nodes, placement: Placement) -> None:
    """Refuses nodes that order or compare text in another way than the query node."""
    mine = _locale(database)

    def locale(_name: str, engine: Engine) -> dict[str, object]:
        with engine.connect() as connection:
            return _locale(connection)

    for name, theirs in nodes.each(locale, set(placement.node_of.values())).all().items():
        for what in mine.keys() & theirs.keys():
            if mine[what] != theirs[what]:
                raise ClusterConflict(
                    f'the query node has {what} {mine[what]!r}, and node "{name}" {theirs[what]!r}',
                    hint="Create the query node's database with the encoding and locale of the nodes.",
                )


def _create_local(nodes: Nodes, views: _Views) -> None:
    """Creates the nodes' views that are missing. Those that are read now stay until others are."""

    def create(name: str) -> None:
        wanted = _of_node(views, name)
        with nodes[name].begin() as connection:
            prepare(connection)
            there = set(_local_names(connection))
            missing = [view for key, view in wanted.items() if key not in there]
            if missing:
                run(connection, [sql.SQL("create schema if not exists {}").format(sql.Identifier(LOCAL))])
                _require_own(connection, name)
            for view in missing:
                run(connection, view.creation())

    nodes.each(lambda name, _: create(name), {v.node for by in views.values() for v in by.values()}).all()


def _require_own(connection: Connection, node: str) -> None:
    """Refuses a schema that another role made: what is in it could be anything."""
    owner = connection.scalar(
        text("""select pg_get_userbyid(nspowner) from pg_namespace
                where nspname = :schema and not pg_has_role(current_user, nspowner, 'member')"""),
        {"schema": LOCAL},
    )
    if owner is not None:
        raise ClusterConflict(
            f'schema {LOCAL} on node "{node}" belongs to role "{owner}"',
            hint="Drop it, or run the command as that role.",
        )


def _local_names(connection: Connection) -> list[str]:
    found = connection.scalars(
        text("""select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where n.nspname = :schema and c.relkind = 'v' and starts_with(c.relname, 'v_')"""),
        {"schema": LOCAL},
    )
    return list(found)


def _drop_unused_local(nodes: Nodes, views: _Views, before: Shown) -> None:
    """Drops the nodes' views that nobody needs; a query that has begun may still need those from before."""
    kept = {name for table in before.tables for name in table.parts.values()}

    def drop(name: str) -> None:
        wanted = _of_node(views, name).keys() | kept
        with nodes[name].begin() as connection:
            prepare(connection)
            for old in _local_names(connection):
                if old not in wanted:
                    run(connection, query_statements.local_removal(old))

    for name in nodes:
        # What is left now goes with the next refresh.
        with suppress(ShardidsError):
            drop(name)


def _change(
    database: Connection, there: QueryNode, tables: Collection[QueryTable], views: _Views, shown: Shown
) -> list[str]:
    """Changes the tables that differ, under locks on all of them: a query sees all changes or none."""
    present = {table.name: table for table in shown.tables}
    wanted = {table.name: table for table in tables}
    unlike = [name for name, table in wanted.items() if not _is_same(table, present.get(name))]
    gone = [name for name in present if name not in wanted or name in unlike]
    changes = {
        name: list(
            query_statements.parts(table, views[name], present[name].parts if name not in unlike else {})
        )
        for name, table in wanted.items()
    }
    changed = sorted({*gone, *(name for name, steps in changes.items() if steps)} & present.keys())
    _lock_tables(database, there, changed)
    done = run(database, (step for name in gone for step in query_statements.table_removal(name)))
    done += run(database, _types(wanted.values(), shown, kept=wanted.keys() - set(unlike)))
    for name in unlike:
        readers = present[name].readers if name in present else {}
        done += run(database, query_statements.table_creation(wanted[name], readers))
    return done + run(database, (step for steps in changes.values() for step in steps))


def _is_same(table: QueryTable, shown: ShownTable | None) -> bool:
    return shown is not None and shown.signature == query_statements.signature(table)


def _types(tables: Iterable[QueryTable], shown: Shown, *, kept: Collection[str]) -> Iterator[sql.Composable]:
    """Creates the enum types that are missing, and drops those that no table uses."""
    in_use = {name for table in tables if table.name in kept for name in table.enums}
    wanted = {name: labels for table in tables for name, labels in table.enums.items() if name not in in_use}
    for name in shown.enums:
        if name not in in_use:
            yield sql.SQL("drop type {}").format(sql.Identifier(QUERY, name))
    yield from query_statements.enum_types(wanted)


def _lock_tables(database: Connection, there: QueryNode, names: Collection[str]) -> None:
    """Locks tables in short attempts: queries that come later don't wait for a long one that came before.

    Raises:
        ClusterConflict: a query has kept a lock for a minute.
    """
    if not names:
        return
    # Locking a view locks what it reads and the partitions of that, in the order in which queries do.
    views = sql.SQL(", ").join(sql.Identifier(s, name) for name in names for s in (QUERY, NODES))
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with database.begin_nested():
                database.execute(text(f"set local lock_timeout = {_ATTEMPT_MS}"))
                run(database, [sql.SQL("lock table {} in access exclusive mode").format(views)])
            return
        except StatementFailed as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            if time.monotonic() > deadline:
                raise ClusterConflict(
                    f"queries on {there.where} have been reading the views for {_PATIENCE_S:g} s",
                    hint="Wait for them, or see in pg_stat_activity there what they do.",
                ) from error
        time.sleep(_PAUSE_S)


def _trials(views: _Views) -> Iterator[tuple[str, sql.Composable]]:
    """Yields for every server a query that reads a row of one table."""
    tried: set[str] = set()
    for table, by_server in views.items():
        for server in by_server.keys() - tried:
            tried.add(server)
            yield server, query_statements.trial(table, server)
