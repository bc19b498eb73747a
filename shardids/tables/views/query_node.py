"""The query node: a database that shows every table as one, with the rows of all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.pg.queries import prepare
from shardids.pg.urls import parse_url, shown_url
from shardids.tables.views.database import connection_to, extension_removal, lock, run, unused_servers
from shardids.tables.views.refresh import Refreshed, Shown, bring_up_to_date, shown_tables
from shardids.tables.views.statements import (
    local_schema_removal,
    probe_removal,
    query_removal,
    reading,
    table_removal,
)


def create_query_node(
    catalog: Catalog,
    *,
    node: str | None = None,
    url: str | None = None,
    sharded: Sequence[str] = (),
    reference: Sequence[str] = (),
    store_password: bool = False,
    dry_run: bool = False,
) -> Refreshed:
    """Make a node, or another database, the cluster's query node instead of the present one. Idempotent.

    Schema ``shardids_query`` there gets a view of every table, with the rows of all shards.

    Args:
        catalog: the cluster's catalog.
        node: the node.
        url: the database, if it is not a node.
        sharded: tables whose rows are each in one shard, though no ID in them says so; they are recorded.
        reference: tables that have the same rows in every shard; they are recorded.
        store_password: store the nodes' passwords in its user mappings.
        dry_run: change that database, and roll back.

    Raises:
        BadArgument: not exactly one of ``node`` and ``url`` is given, or a name has no table.
        ClusterConflict: a shard lacks a table, or the database is a template or another cluster's.
        MissingPrivilege: the role lacks a privilege, or needs stored passwords.
        StatementFailed: a node cannot be read from there. The query node was not changed.
    """
    before = query_node_of(catalog)
    wanted = _with_tables(_wanted(catalog, node, url), before, sharded, reference)
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        _record(connection, wanted)
        done = bring_up_to_date(
            catalog,
            wanted,
            url=url,
            store_password=store_password,
            dry_run=dry_run,
            named=(*sharded, *reference),
        )
        if dry_run:
            transaction.rollback()
            return done
    if before is not None and (before.node, before.url) != (wanted.node, wanted.url):
        try:
            _remove(catalog, before, dry_run=False)
        except ShardidsError as error:
            left = (
                f"the views of the former query node stay on {before.where}, and nobody refreshes them:"
                f" {error.message}"
            )
            return replace(done, left_out=(*done.left_out, left))
    return done


def found_query_node(
    catalog: Catalog, *, node: str | None = None, url: str | None = None, store_password: bool = False
) -> tuple[str, ...]:
    """Record the query node of a new cluster, and make it; return a line if it can't be made yet.

    Args: as those of :func:`create_query_node`.

    Raises:
        BadArgument: not exactly one of ``node`` and ``url`` is given.
        ClusterConflict: the node does not exist, or the query node is elsewhere.
    """
    wanted = _wanted(catalog, node, url)
    before = query_node_of(catalog)
    if before is None:
        with catalog.engine.begin() as connection:
            _record(connection, wanted)
    elif (before.node, before.url) != (wanted.node, wanted.url):
        raise ClusterConflict(
            f"the query node is {before.where} already",
            hint="To replace it: shardids query-node create",
        )
    return follow(catalog, url=url, store_password=store_password)


def _with_tables(
    wanted: QueryNode, before: QueryNode | None, sharded: Sequence[str], reference: Sequence[str]
) -> QueryNode:
    """Add tables to those that are recorded as sharded or as the same in all shards."""
    known = before or wanted
    return replace(
        wanted,
        sharded=tuple(sorted({*known.sharded, *sharded} - set(reference))),
        reference=tuple(sorted({*known.reference, *reference} - set(sharded))),
    )


def _wanted(catalog: Catalog, node: str | None, url: str | None) -> QueryNode:
    if (node is None) == (url is None):
        raise BadArgument(
            "a query node needs a node or another database", hint="Give one of --on NODE and --url URL."
        )
    if node is not None:
        catalog.existing_node(node)
    shown = None if url is None else shown_url(parse_url(url))
    return QueryNode(node=node, url=shown)


def _record(connection: Connection, wanted: QueryNode) -> None:
    connection.execute(
        text("""
            insert into shardids_catalog.query_node (node, url, sharded, reference)
            values (:node, :url, :sharded, :reference)
            on conflict (only_row) do update
            set node = excluded.node, url = excluded.url, sharded = excluded.sharded,
                reference = excluded.reference"""),
        {
            "node": wanted.node,
            "url": wanted.url,
            "sharded": list(wanted.sharded),
            "reference": list(wanted.reference),
        },
    )


def follow(
    catalog: Catalog, *, url: str | None = None, store_password: bool = False, settled: int | None = None
) -> tuple[str, ...]:
    """Refresh the query node after a change of nodes, shards or tables; return a line if that failed.

    ``url`` may bring the password of a query node that is not a node; ``settled`` is as in
    :func:`~shardids.tables.views.refresh.bring_up_to_date`.
    """
    try:
        there = query_node_of(catalog)
        if there is not None:
            bring_up_to_date(catalog, there, url=url, store_password=store_password, settled=settled)
    except ShardidsError as error:
        hint = error.hint or "When that is repaired"
        if "query-node refresh" not in hint:
            hint = f"{hint.rstrip('.')}. Then: shardids query-node refresh"
        return (
            "the query node does not show today's shards and tables, and may refuse sessions:"
            f" {error.message}. {hint}",
        )
    return ()


def refresh_query_node(
    catalog: Catalog, *, store_password: bool = False, dry_run: bool = False
) -> Refreshed | None:
    """Make the query node show all shards' tables as they are; ``None`` without a query node.

    Raises as :func:`create_query_node` does.
    """
    there = query_node_of(catalog)
    if there is None:
        return None
    return bring_up_to_date(catalog, there, store_password=store_password, dry_run=dry_run)


def drop_query_node(catalog: Catalog, *, dry_run: bool = False) -> list[str]:
    """Drop the views of all tables, there and on the nodes; return the statements that were run there.

    Raises:
        ClusterConflict: the cluster has no query node.
        StatementFailed: other objects use it. Nothing was changed.
    """
    return _remove(catalog, _present(catalog), dry_run=dry_run)


def grant(catalog: Catalog, role: str, *, dry_run: bool = False) -> list[str]:
    """Let a role read all tables of the query node, later ones also; return the statements that were run.

    It reads with the rights of the views' owner: row security of the nodes' tables applies to that one.

    Raises:
        ClusterConflict: the query node or the role does not exist.
    """
    with connection_to(catalog, _present(catalog)) as database, database.begin() as transaction:
        if not database.scalar(text("select to_regrole(quote_ident(:role)) is not null"), {"role": role}):
            raise ClusterConflict(f'the query node has no role "{role}"', hint="Create it there first.")
        done = run(database, reading(role))
        if dry_run:
            transaction.rollback()
    return done


def _present(catalog: Catalog) -> QueryNode:
    there = query_node_of(catalog)
    if there is None:
        raise ClusterConflict(
            "the cluster has no query node", hint="To make one: shardids query-node create --on NODE"
        )
    return there


def _remove(catalog: Catalog, there: QueryNode, *, dry_run: bool) -> list[str]:
    """Drop a query node; the nodes' views and the record, only if it is still the cluster's."""

    def removal(shown: Shown) -> Iterator[sql.Composable]:
        for table in shown.tables:
            yield from table_removal(table.name)
        yield from map(probe_removal, shown.probed)

    with connection_to(catalog, there) as database, database.begin() as transaction:
        lock(database, there.where)
        shown = shown_tables(database)
        done = run(database, removal(shown))
        done += run(database, unused_servers(database))
        done += run(database, extension_removal(database))
        done += run(database, query_removal(shown.enums))
        if dry_run:
            transaction.rollback()
            return done
        is_recorded = query_node_of(catalog) == there
        if is_recorded:
            with catalog.engine.begin() as connection:
                connection.execute(text("delete from shardids_catalog.query_node"))
    if is_recorded:
        with Nodes(catalog.nodes(), catalog.url) as nodes:
            for name in nodes:
                with suppress(ShardidsError), nodes[name].begin() as connection:
                    prepare(connection)
                    run(connection, [local_schema_removal()])
    return done
