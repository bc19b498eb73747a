"""A table of all shards as one view, by PostgreSQL's own means: ``postgres_fdw`` and a partitioned table.

Such a view is in schema ``shardids_views`` of a node, or of a database of its own, and read-only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection, text

from shardids.catalog.connections import (
    CONNECT_TIMEOUT_S,
    open_engine,
    parse_url,
    shown_url,
    with_password_of,
)
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.queries import prepare, rows
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.topology import Placement
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.install.provision import node_engine
from shardids.views import statements
from shardids.views.home import (
    correct_servers,
    logins,
    present_columns,
    run,
    server_of,
    try_servers,
    unused_servers,
)
from shardids.views.planning import plan_of
from shardids.views.state import View, ViewSource, read_sources, stale_shards, views_in

__all__ = ["View", "create", "drop", "follow_placement", "listed", "refresh", "refresh_all", "views_in"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_LOCK_PATIENCE_S = 60.0
"""How long it is waited for: a refresh asks every node, and may wait for silent ones."""
_LOCK_NOT_AVAILABLE = "55P03"


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
    """Makes a view over a table of all shards, on a node or in another database; again is no error.

    Args:
        catalog: the cluster's.
        name: the view's, in schema ``shardids_views``.
        table: the table's name in every shard.
        id_column: a ``bigint`` column with IDs of the shard that the row is in.
        node: the node that is to have the view.
        url: the database that is to have it, if no node is.
        store_password: store the passwords that the nodes were logged in to with in its user mappings.
        dry_run: do all of it and take it back.

    Returns:
        The statements that were run, without passwords.

    Raises:
        BadArgument: a name that is not allowed, neither or both of ``node`` and ``url``, or no such column.
        ClusterConflict: the name is another view's, or the table is not the same in all shards.
        MissingPrivilege: the role may not do it, or needs passwords to be stored.
        StatementFailed: a server can't be read from there. Nothing was changed.
    """
    if not _NAME.fullmatch(name):
        raise BadArgument(f"{name!r} can't be a view's name: 1 to 40 of a-z, 0-9 and '_', no digit first")
    if (node is None) == (url is None):
        raise BadArgument("a view is on a node or in another database", hint="One of: --on NODE, --url URL")
    shown = None if url is None else shown_url(parse_url(url))
    view = View(name=name, table_name=table, id_column=id_column, node=node, url=shown)
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        if node is not None and node not in (nodes := catalog.nodes()):
            raise unknown_node(node, nodes)
        there = {one.name: one for one in views_in(catalog)}.get(name)
        if there is not None and there != view:
            raise ClusterConflict(
                f'view "{name}" is there already: table "{there.table_name}" by {there.id_column}, on'
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
    """Makes a view read every shard where it is now; returns the statements that were run, as :func:`create`.

    Raises as :func:`create` does, and ClusterConflict if there is no such view.
    """
    return _bring_up_to_date(
        catalog, _known(catalog, name), url=None, store_password=store_password, dry_run=dry_run
    )


def refresh_all(
    catalog: Catalog, *, store_password: bool = False, dry_run: bool = False
) -> dict[str, list[str]]:
    """Refreshes all views, one after the other; returns the statements of each. Raises as :func:`refresh`."""
    return {
        view.name: refresh(catalog, view.name, store_password=store_password, dry_run=dry_run)
        for view in views_in(catalog)
    }


def follow_placement(catalog: Catalog) -> tuple[str, ...]:
    """Refreshes all views after a change of the placement; what could not be, and what to do, a line each."""
    complaints = []
    try:
        views = views_in(catalog)
    except ShardidsError as error:
        return (
            f"views may still read shards where they were: {error.message};"
            " when that is mended: shardids view refresh",
        )
    for view in views:
        try:
            refresh(catalog, view.name)
        except ShardidsError as error:
            complaints.append(
                f'view "{view.name}" on {view.where} still reads shards where they were: {error.message};'
                f" when that is mended: shardids view refresh {view.name}"
            )
    return tuple(complaints)


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[str]:
    """Drops a view, its foreign tables, and the servers that no other view uses; returns the statements.

    Raises:
        ClusterConflict: there is no such view.
        StatementFailed: other objects use it. Nothing was changed.
    """
    view = _known(catalog, name)
    with _home(catalog, view, None) as home, home.begin() as transaction:
        done = run(home, statements.removal(name))
        done += run(home, unused_servers(home))
        if dry_run:
            transaction.rollback()
        else:
            with catalog.engine.begin() as connection:
                connection.execute(
                    text("delete from shardids_catalog.view where name = :name"), {"name": name}
                )
    return done


def listed(catalog: Catalog) -> list[dict[str, object]]:
    """The views, ready to be shown: ``stale`` is how many shards each does not read where they are now.

    ``stale`` is ``None`` where the view's database can't be reached.
    """
    placement, prefix = catalog.placement(), catalog.describe().schema_prefix
    rows: list[dict[str, object]] = []
    for view in views_in(catalog):
        stale: int | None = None
        with suppress(ConnectionFailed), _home(catalog, view, None) as home:
            sources = read_sources(home, prefix)
            stale = len(stale_shards(view, sources, placement.node_of, placement.nodes))
        rows.append(
            {
                "view": view.name,
                "table": view.table_name,
                "id": view.id_column,
                "on": view.node or view.url,
                "shards": len(placement.node_of),
                "stale": stale,
            }
        )
    return rows


def _known(catalog: Catalog, name: str) -> View:
    views = {view.name: view for view in views_in(catalog)}
    if name not in views:
        there = ", ".join(views) or "none yet"
        raise ClusterConflict(f'there is no view "{name}"', hint=f"Views: {there}.")
    return views[name]


@contextmanager
def _home(catalog: Catalog, view: View, url: str | None) -> Iterator[Connection]:
    """A connection to the database that has the view, or is to have it."""
    if view.node is not None:
        engine = node_engine(catalog.nodes()[view.node], catalog.url, connect_timeout_s=CONNECT_TIMEOUT_S)
    else:
        database = with_password_of(parse_url(url or str(view.url)), catalog.url)
        engine = open_engine(
            database,
            what="the database of the view",
            administrative=True,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            pool_size=1,
        )
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _bring_up_to_date(
    catalog: Catalog, view: View, *, url: str | None, store_password: bool, dry_run: bool
) -> list[str]:
    description = catalog.describe()
    with _home(catalog, view, url) as home, home.begin() as transaction:
        _lock(home, view.where)
        # Read under the lock: who comes second has the newer one.
        placement = catalog.placement()
        plan = plan_of(catalog, view, placement, description.schema_prefix)
        prepare(home, schema_prefix=description.schema_prefix)
        sources = rows(home, read_sql("views/state.v1"), ViewSource)
        present = {source.shard: source.server for source in sources if source.view_name == view.name}
        columns, done = present_columns(home, view.name), []
        if columns is None:
            done += run(home, statements.foundation(description.layout))
            # What is left of a view that was dropped with the schema of a shard.
            run(home, statements.removal(view.name))
        done += correct_servers(home, _servers(catalog, home, plan, placement, store_password=store_password))
        done += run(home, statements.view(plan, present, columns))
        done += run(home, unused_servers(home))
        try_servers(home, plan, view.where)
        if dry_run:
            transaction.rollback()
    return done


def _lock(home: Connection, where: str) -> None:
    try:
        home.execute(
            text("select set_config('lock_timeout', :timeout, true)"),
            {"timeout": f"{_LOCK_PATIENCE_S * 1000:.0f}ms"},
        )
        home.execute(text("select pg_advisory_xact_lock(:class, 0)"), {"class": AdvisoryLock.VIEWS})
    except StatementFailed as error:
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        raise ClusterConflict(
            f"another process has been changing views on {where} for {_LOCK_PATIENCE_S:g} s",
            hint="Wait for it, or look in pg_stat_activity there what it does.",
        ) from error


def _servers(
    catalog: Catalog, home: Connection, plan: statements.Plan, placement: Placement, *, store_password: bool
) -> list[statements.Server]:
    """The nodes that the view is to read. A new one's password, if any, is stored where the others' are."""
    used = {source.server for source in plan.sources if source.server is not None}
    there = logins(home)
    return [
        server_of(
            catalog,
            node,
            store_password=store_password or (any(there.values()) and server not in there),
            must_have=store_password,
        )
        for node in placement.nodes.values()
        if (server := statements.server_name(node.name)) in used
    ]
