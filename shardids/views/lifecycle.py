"""Creates, refreshes, lists and drops views over all shards."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from sqlalchemy import text

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare, rows
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, ShardidsError
from shardids.views import statements
from shardids.views.database import (
    connection_to,
    correct_regions,
    correct_servers,
    lock,
    present_columns,
    run,
    try_servers,
    unused_servers,
    wanted_servers,
)
from shardids.views.planning import plan_of
from shardids.views.query_node import ALL_TABLES, query_node_row, refresh_query_node
from shardids.views.state import View, ViewSource, read_sources, stale_shards, views_of

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def create(
    catalog: Catalog,
    name: str,
    *,
    table: str,
    id_column: str = "id",
    node: str | None = None,
    url: str | None = None,
    store_password: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """Creates a view over a table of all shards, on a node or in another database. Calls are idempotent.

    Args:
        catalog: the cluster's catalog.
        name: the view's name, in schema ``shardids_views``.
        table: the table's name in every shard.
        id_column: a ``bigint`` column whose IDs are of the shard that the row is in.
        node: the node to create the view on.
        url: the database to create it in, if not on a node.
        store_password: store the nodes' passwords in its user mappings.
        dry_run: do all of it and roll back.

    Returns:
        The statements that were run, without passwords.

    Raises:
        BadArgument: the name is not allowed, not exactly one of ``node`` and ``url`` is given, or there is
            no such column.
        ClusterConflict: another view has the name, or the table differs between shards.
        MissingPrivilege: the role lacks a privilege, or needs stored passwords.
        StatementFailed: a server cannot be read from there. Nothing was changed.
    """
    if not _NAME.fullmatch(name):
        raise BadArgument(
            f"{name!r} can't be a view's name: it takes 1 to 40 of a-z, 0-9 and '_', no digit first"
        )
    if (node is None) == (url is None):
        raise BadArgument("a view is on a node or in another database", hint="One of: --on NODE, --url URL")
    shown = None if url is None else shown_url(parse_url(url))
    view = View(name=name, table_name=table, id_column=id_column, node=node, url=shown)
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        if node is not None and node not in (nodes := catalog.nodes()):
            raise unknown_node(node, nodes)
        there = {one.name: one for one in views_of(catalog)}.get(name)
        if there is not None and there != view:
            raise ClusterConflict(
                f'view "{name}" exists already, over table "{there.table_name}" by {there.id_column}, on'
                f" {there.where}",
                hint=f"Choose another name, or: shardids view drop {name}",
            )
        if there is None:
            connection.execute(
                text("""insert into shardids_catalog.view (name, table_name, id_column, node, url)
                        values (:name, :table, :id_column, :node, :url)"""),
                {"name": name, "table": table, "id_column": id_column, "node": node, "url": shown},
            )
        done = _bring_up_to_date(catalog, view, url=url, store_password=store_password, dry_run=dry_run)
        if dry_run:
            transaction.rollback()
    return done


def refresh(catalog: Catalog, name: str, *, store_password: bool = False, dry_run: bool = False) -> list[str]:
    """Makes a view read every shard from its owner; returns the statements that were run.

    Raises as :func:`create` does, and ClusterConflict if there is no such view.
    """
    return _bring_up_to_date(
        catalog, _known(catalog, name), url=None, store_password=store_password, dry_run=dry_run
    )


def refresh_all(
    catalog: Catalog, *, store_password: bool = False, dry_run: bool = False
) -> dict[str, list[str]]:
    """Refreshes all views and the query node; returns the statements of each. Raises as :func:`refresh`."""
    done = {
        view.name: refresh(catalog, view.name, store_password=store_password, dry_run=dry_run)
        for view in views_of(catalog)
    }
    there = refresh_query_node(catalog, store_password=store_password, dry_run=dry_run)
    return done if there is None else done | {ALL_TABLES: there.statements}


def follow_placement(catalog: Catalog) -> tuple[str, ...]:
    """Refreshes all views after a change of the placement; returns a line about each that failed."""
    complaints = []
    try:
        views = views_of(catalog)
    except ShardidsError as error:
        return (
            f"views may still read shards where they were: {error.message};"
            " when that is repaired: shardids view refresh",
        )
    for view in views:
        try:
            refresh(catalog, view.name)
        except ShardidsError as error:
            complaints.append(
                f'view "{view.name}" on {view.where} still reads shards where they were: {error.message};'
                f" when that is repaired: shardids view refresh {view.name}"
            )
    return (*complaints, *follow_tables(catalog))


def follow_tables(catalog: Catalog) -> tuple[str, ...]:
    """Refreshes the query node after a change of shards or tables; returns a line if that failed."""
    try:
        refresh_query_node(catalog)
    except ShardidsError as error:
        return (
            "the query node still shows shards and tables as they were, and sessions are refused there:"
            f" {error.message}; when that is repaired: shardids view refresh",
        )
    return ()


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[str]:
    """Drops a view, its foreign tables, and the servers that no other view uses; returns the statements.

    Raises:
        ClusterConflict: there is no such view.
        StatementFailed: other objects use it. Nothing was changed.
    """
    view = _known(catalog, name)
    with connection_to(catalog, view) as database, database.begin() as transaction:
        done = run(database, statements.removal(name))
        done += run(database, unused_servers(database))
        if dry_run:
            transaction.rollback()
        else:
            with catalog.engine.begin() as connection:
                connection.execute(
                    text("delete from shardids_catalog.view where name = :name"), {"name": name}
                )
    return done


def listed(catalog: Catalog) -> list[dict[str, object]]:
    """Returns the views, ready to be shown: ``stale`` is how many shards each does not read from their owner.

    ``stale`` is ``None`` where the view's database cannot be reached.
    """
    placement, prefix = catalog.placement(), catalog.describe().schema_prefix
    shown: list[dict[str, object]] = []
    for view in views_of(catalog):
        stale: int | None = None
        with suppress(ConnectionFailed), connection_to(catalog, view) as database:
            sources = read_sources(database, prefix)
            stale = len(stale_shards(view, sources, placement.node_of, placement.nodes))
        shown.append(
            {
                "view": view.name,
                "table": view.table_name,
                "id": view.id_column,
                "on": view.node or view.url,
                "shards": len(placement.node_of),
                "stale": stale,
            }
        )
    there = query_node_row(catalog)
    return shown if there is None else [*shown, there]


def _known(catalog: Catalog, name: str) -> View:
    views = {view.name: view for view in views_of(catalog)}
    if name not in views:
        there = ", ".join(views) or "none yet"
        raise ClusterConflict(f'there is no view "{name}"', hint=f"Views: {there}.")
    return views[name]


def _bring_up_to_date(
    catalog: Catalog, view: View, *, url: str | None, store_password: bool, dry_run: bool
) -> list[str]:
    description = catalog.describe()
    prefix = description.schema_prefix
    with connection_to(catalog, view, url) as database, database.begin() as transaction:
        lock(database, view.where)
        # Reads the placement under the lock, so that the second of two callers has the newer one.
        placement = catalog.placement()
        prepare(database, schema_prefix=prefix)
        sources = rows(database, read_sql("views/state.v1"), ViewSource)
        present = {source.shard: source.server for source in sources if source.view_name == view.name}
        columns, done = present_columns(database, view.name), []
        with Nodes(placement.nodes, catalog.url) as nodes:
            plan = plan_of(nodes, view, placement, prefix)
            used = {source.server for source in plan.sources if source.server is not None}
            servers = wanted_servers(database, nodes, used, placement, store_password=store_password)
        if columns is None:
            done += run(database, statements.foundation(description.layout))
            # Removes what is left of a view that was dropped with a shard's schema.
            run(database, statements.removal(view.name))
        done += correct_regions(database, list(placement.regions.values()))
        done += correct_servers(database, servers)
        done += run(database, statements.view(plan, present, columns))
        done += run(database, unused_servers(database))
        try_servers(database, statements.trials(plan), view.where)
        if dry_run:
            transaction.rollback()
    return done
