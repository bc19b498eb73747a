"""A table of all shards as one view, by PostgreSQL's own means: ``postgres_fdw`` and a partitioned table.

Such a view is in schema ``shardids_views`` of a node, or of a database of its own, and read-only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog import Catalog, unknown_node
from shardids.connect import open_engine, parse_url, role_of, shown_url, with_password_of
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, MissingPrivilege, StatementFailed
from shardids.provision import node_engine
from shardids.queries import prepare, read
from shardids.topology import Node, Placement, schema_name
from shardids.views import statements
from shardids.views.state import View, read_sources, stale_shards, views_in
from shardids.views.statements import Column, Plan, Server, Source

__all__ = ["View", "create", "drop", "listed", "refresh", "refresh_all", "views_in"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_HIDDEN = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableColumns:
    """The columns of the table in one shard: a row of ``view_columns.v1.sql``."""

    shard: int
    names: list[str]
    types: list[str]
    are_cast: list[bool]

    @property
    def columns(self) -> tuple[Column, ...]:
        rows = zip(self.names, self.types, self.are_cast, strict=True)
        return tuple(Column(name=name, type=type_, is_cast=is_cast) for name, type_, is_cast in rows)


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


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[str]:
    """Drops a view, its foreign tables, and the servers that no other view uses; returns the statements.

    Raises:
        ClusterConflict: there is no such view.
        StatementFailed: other objects use it. Nothing was changed.
    """
    view = _known(catalog, name)
    with _home(catalog, view, None) as home, home.begin() as transaction:
        done = _run(home, statements.removal(name))
        done += _run(home, _unused_servers(home))
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
        engine = node_engine(catalog.nodes()[view.node], catalog.url)
    else:
        database = with_password_of(parse_url(url or str(view.url)), catalog.url)
        engine = open_engine(database, what="the database of the view", administrative=True, pool_size=1)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _bring_up_to_date(
    catalog: Catalog, view: View, *, url: str | None, store_password: bool, dry_run: bool
) -> list[str]:
    description, placement = catalog.describe(), catalog.placement()
    plan = _plan(catalog, view, placement, description.schema_prefix)
    used = {source.server for source in plan.sources if source.server is not None}
    servers = [
        _server(catalog, node, store_password=store_password)
        for node in placement.nodes.values()
        if statements.server_name(node.name) in used
    ]
    with _home(catalog, view, url) as home:
        sources = read_sources(home, description.schema_prefix)
        present = {source.shard: source.server for source in sources if source.view_name == view.name}
        with home.begin() as transaction:
            prepare(home)
            columns, done = _present_columns(home, view.name), []
            if columns is None:
                done += _run(home, statements.foundation(description.layout))
                # What is left of a view that was dropped with the schema of a shard.
                _run(home, statements.removal(view.name))
            done += _correct_servers(home, servers)
            done += _run(home, statements.view(plan, present, columns))
            done += _run(home, _unused_servers(home))
            _try_servers(home, plan, view.where)
            if dry_run:
                transaction.rollback()
    return done


def _plan(catalog: Catalog, view: View, placement: Placement, prefix: str) -> Plan:
    """What the view is to be, from the table as it is in all shards."""
    tables: dict[int, tuple[Column, ...]] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(placement.nodes))) as pool:
        for name, found in pool.map(
            lambda node: (node.name, _table_columns(catalog, node, view.table_name)), placement.nodes.values()
        ):
            tables |= {one.shard: one.columns for one in found if placement.node_of.get(one.shard) == name}
    missing = sorted(placement.node_of.keys() - tables.keys())
    if missing:
        raise ClusterConflict(
            f'{len(missing)} shards have no table "{view.table_name}": shard {missing[0]} on node'
            f' "{placement.node_of[missing[0]]}", for one',
            hint="Make the table in all shards first: the view reads them all.",
        )
    if not tables:
        raise ClusterConflict("the cluster has no shard yet", hint="To make them: shardids shard create")
    first, *others = sorted(tables)
    for shard in others:
        if tables[shard] != tables[first]:
            raise ClusterConflict(
                f'table "{view.table_name}" has other columns in shard {shard} than in shard {first}',
                hint="Bring all shards to one revision first.",
            )
    types = {column.name: column.type for column in tables[first]}
    if types.get(view.id_column) != "bigint":
        raise BadArgument(
            f'"{view.table_name}" has no column "{view.id_column}" of type bigint',
            hint="--id names the column with IDs of the shard that a row is in; the view finds shards by it.",
        )
    return Plan(
        name=view.name,
        table_name=view.table_name,
        id_column=view.id_column,
        columns=tables[first],
        sources=[
            Source(
                shard=shard,
                schema=schema_name(prefix, shard),
                server=None if node == view.node else statements.server_name(node),
            )
            for shard, node in sorted(placement.node_of.items())
        ],
    )


def _table_columns(catalog: Catalog, node: Node, table: str) -> list[_TableColumns]:
    engine = node_engine(node, catalog.url)
    try:
        with engine.connect() as connection:
            return read(connection, "view_columns.v1", _TableColumns, table_name=table)
    finally:
        engine.dispose()


def _server(catalog: Catalog, node: Node, *, store_password: bool) -> Server:
    url = with_password_of(parse_url(node.url), catalog.url)
    password = None
    if store_password:
        engine = node_engine(node, catalog.url)
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            password = driver.info.password if isinstance(driver, psycopg.Connection) else ""
        engine.dispose()
        if not password:
            raise BadArgument(
                f'node "{node.name}" was logged in to without a password: there is none to store',
                hint="Leave --store-password out.",
            )
    return Server(
        name=statements.server_name(node.name),
        options=statements.server_options(url),
        user=role_of(url),
        password=password,
    )


def _correct_servers(home: Connection, servers: Sequence[Server]) -> list[str]:
    """Makes the servers and user mappings that are missing, and corrects the options of the others."""
    is_superuser = bool(home.scalar(text("select rolsuper from pg_roles where rolname = current_user")))
    rows = home.execute(
        text("""select s.srvname, s.srvoptions, exists (
                  select from pg_user_mappings m where m.srvid = s.oid and m.usename = current_user
                ) as is_mapped
                from pg_foreign_server s""")
    ).all()
    present = {row.srvname: dict(option.split("=", 1) for option in row.srvoptions or ()) for row in rows}
    mapped = {row.srvname for row in rows if row.is_mapped}
    done = []
    for server in servers:
        if not is_superuser and server.password is None and server.name not in mapped:
            raise MissingPrivilege(
                f"{server.name}: postgres_fdw lets only superusers log in to other servers without a stored"
                " password",
                hint="Add --store-password, or make the mapping yourself: CREATE USER MAPPING FOR"
                f' CURRENT_USER SERVER "{server.name}" OPTIONS (user …, password …)',
            )
        done += _run(home, statements.server(server, present.get(server.name)), server.password)
        if server.password is not None or server.name not in mapped:
            login = statements.user_mapping(server, is_mapped=server.name in mapped)
            done += _run(home, login, server.password)
    return done


def _try_servers(home: Connection, plan: Plan, where: str) -> None:
    """Reads from every server: a wrong address or password shows before anything is committed."""
    for server, query in statements.trials(plan):
        try:
            _run(home, [query])
        except (ConnectionFailed, MissingPrivilege, StatementFailed) as error:
            detail = getattr(getattr(error.__cause__, "orig", error.__cause__), "diag", None)
            reason = getattr(detail, "message_detail", None) or error.message
            raise StatementFailed(
                f"{where} can't read from {server}: {reason}",
                hint="The address in the node's URL must hold from there, too; and only superusers log in"
                " without a stored password (--store-password).",
            ) from error


def _present_columns(home: Connection, name: str) -> list[tuple[str, str]] | None:
    """Names and types of a view's columns, the shard left out; ``None`` if there is no such view."""
    rows = home.execute(
        text("""
            select a.attname, format_type(a.atttypid, a.atttypmod)
            from pg_class c
            join pg_namespace n on n.oid = c.relnamespace and n.nspname = :schema
            join pg_attribute a on a.attrelid = c.oid and a.attnum > 1 and not a.attisdropped
            where c.relname = :name and c.relkind = 'v' order by a.attnum"""),
        {"schema": statements.SCHEMA, "name": name},
    ).all()
    return [(row[0], row[1]) for row in rows] or None


def _unused_servers(home: Connection) -> Iterator[sql.Composable]:
    """Drops servers of ours that no table uses."""
    names = home.scalars(
        text("""
            select s.srvname from pg_foreign_server s
            where starts_with(s.srvname, 'shardids_')
              and not exists (select from pg_foreign_table f where f.ftserver = s.oid)""")
    ).all()
    for name in names:
        yield sql.SQL("drop server {} cascade").format(sql.Identifier(name))


def _run(connection: Connection, queries: Iterable[sql.Composable], password: str | None = None) -> list[str]:
    """Runs statements; returns them, the password left out."""
    done = []
    for query in queries:
        statement = query.as_string()
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)
        done.append(statement.replace(password, _HIDDEN) if password else statement)
    return done
