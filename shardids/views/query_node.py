"""The query node: a database that shows every table as one, with the rows of all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from psycopg import sql
from sqlalchemy import text

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.views.database import connection_to, lock, run, unused_servers
from shardids.views.query_refresh import Refreshed, bring_up_to_date, digest_in, shown_tables
from shardids.views.query_statements import LOCAL, QUERY, query_removal, table_removal

ALL_TABLES: Final = f"{QUERY}.*"
"""How lists name the views of the query node."""


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
    """Makes a node, or another database, the cluster's query node. Calls are idempotent.

    Schema ``shardids_query`` there gets a view of every table, with the rows of all shards.

    Args:
        catalog: the cluster's catalog.
        node: the node.
        url: the database, if it is not a node.
        sharded: tables whose rows are each in one shard, though no ID in them says so.
        reference: tables that have the same rows in every shard.
        store_password: store the nodes' passwords in its user mappings.
        dry_run: do what is done in that database, and roll back.

    Raises:
        BadArgument: not exactly one of ``node`` and ``url`` is given, or there is no table of a name.
        ClusterConflict: the cluster has another query node, or a shard lacks a table.
        MissingPrivilege: the role lacks a privilege, or needs stored passwords.
        StatementFailed: a node cannot be read from there. The query node was not changed.
    """
    if (node is None) == (url is None):
        raise BadArgument("a query node is a node or another database", hint="One of: --on NODE, --url URL")
    shown = None if url is None else shown_url(parse_url(url))
    wanted = QueryNode(node=node, url=shown, sharded=tuple(sharded), reference=tuple(reference))
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        if node is not None and node not in (nodes := catalog.nodes()):
            raise unknown_node(node, nodes)
        there = query_node_of(catalog)
        if there is not None and (there.node, there.url) != (wanted.node, wanted.url):
            raise ClusterConflict(
                f"the query node is {there.where} already", hint="To drop its views: shardids view drop --all"
            )
        connection.execute(
            text("""
                insert into shardids_catalog.query_node (node, url, sharded, reference)
                values (:node, :url, :sharded, :reference)
                on conflict (only_row)
                do update set sharded = excluded.sharded, reference = excluded.reference"""),
            {"node": node, "url": shown, "sharded": list(sharded), "reference": list(reference)},
        )
        done = bring_up_to_date(catalog, wanted, url=url, store_password=store_password, dry_run=dry_run)
        if dry_run:
            transaction.rollback()
    return done


def refresh_query_node(
    catalog: Catalog, *, store_password: bool = False, dry_run: bool = False
) -> Refreshed | None:
    """Makes the query node show all shards' tables as they are; ``None`` if there is none.

    Raises as :func:`create_query_node` does.
    """
    there = query_node_of(catalog)
    if there is None:
        return None
    return bring_up_to_date(catalog, there, url=None, store_password=store_password, dry_run=dry_run)


def drop_query_node(catalog: Catalog, *, dry_run: bool = False) -> list[str]:
    """Drops the views of all tables, there and on the nodes; returns the statements that were run there.

    Raises:
        ClusterConflict: there is no query node.
        StatementFailed: other objects use it. Nothing was changed.
    """
    there = query_node_of(catalog)
    if there is None:
        raise ClusterConflict("the cluster has no query node")

    def removal(names: Sequence[str], enums: Sequence[str]) -> Iterator[sql.Composable]:
        for name in names:
            yield from table_removal(name)
        yield from query_removal(enums)

    with connection_to(catalog, there) as database, database.begin() as transaction:
        lock(database, there.where)
        shown = shown_tables(database)
        done = run(database, removal([table.name for table in shown.tables], shown.enums))
        done += run(database, unused_servers(database))
        if dry_run:
            transaction.rollback()
            return done
        with catalog.engine.begin() as connection:
            connection.execute(text("delete from shardids_catalog.query_node"))
    with Nodes(catalog.nodes(), catalog.url) as nodes:
        for name in nodes:
            with suppress(ShardidsError), nodes[name].begin() as connection:
                prepare(connection)
                run(connection, [sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(LOCAL))])
    return done


def query_node_row(catalog: Catalog) -> dict[str, object] | None:
    """Returns the query node as a row for ``view list``; ``None`` if there is none.

    ``stale`` is 0 if it reads every shard from its owner, else the number of shards; ``None`` where the query
    node cannot be reached.
    """
    there = query_node_of(catalog)
    if there is None:
        return None
    placement = catalog.placement()
    stale: int | None = None
    count: int | str = "?"
    with suppress(ShardidsError), connection_to(catalog, there) as database:
        is_current = digest_in(database) == placement.digest()
        stale = 0 if is_current else len(placement.node_of)
        count = len(shown_tables(database).tables)
    return {
        "view": ALL_TABLES,
        "table": f"all ({count})",
        "id": "",
        "on": there.node or there.url,
        "shards": len(placement.node_of),
        "stale": stale,
    }
