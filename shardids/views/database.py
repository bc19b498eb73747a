"""The database that contains a view: its servers, its user mappings, and the parts of the view it has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.connections import keep_out_of_logs
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.nodes import Nodes, administrative_engine
from shardids.catalog.query_node import QueryNode
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, Placement
from shardids.catalog.urls import parse_url, role_of, with_password_of
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, MissingPrivilege, StatementFailed
from shardids.views import statements
from shardids.views.state import View
from shardids.views.statements import ForeignServer

_HIDDEN: Final = "…"
_LOCK_PATIENCE_S: Final = 60.0
"""How long to wait for another process: a refresh asks every node, and may wait for silent ones."""
_LOCK_NOT_AVAILABLE: Final = "55P03"


@contextmanager
def connection_to(catalog: Catalog, view: View | QueryNode, url: str | None = None) -> Iterator[Connection]:
    """Connects to the database that contains the view, or will; ``url`` may bring its password."""
    if view.node is not None:
        address, what = catalog.existing_node(view.node).url, f'node "{view.node}"'
    else:
        address, what = url or str(view.url), "the database of the view"
    engine = administrative_engine(with_password_of(parse_url(address), catalog.url), what=what)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def correct_regions(database: Connection, regions: Sequence[Region]) -> list[str]:
    """Makes ``shardids_views.region_of`` tell these regions; returns the statements that were run."""
    shown = database.scalar(
        text("select obj_description(to_regprocedure('shardids_views.region_of(integer)'), 'pg_proc')")
    )
    if shown == statements.shown_regions(regions) or not (shown or regions):
        return []
    return run(database, statements.region_function(regions))


def lock(database: Connection, where: str) -> None:
    """Takes the lock under which views are changed, until the end of the transaction.

    Raises:
        ClusterConflict: another process has held it for a minute.
    """
    try:
        database.execute(
            text("select set_config('lock_timeout', :timeout, true)"),
            {"timeout": f"{_LOCK_PATIENCE_S * 1000:.0f}ms"},
        )
        database.execute(text("select pg_advisory_xact_lock(:class, 0)"), {"class": AdvisoryLock.VIEWS})
    except StatementFailed as error:
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        raise ClusterConflict(
            f"another process has been changing views on {where} for {_LOCK_PATIENCE_S:g} s",
            hint="Wait for it, or see in pg_stat_activity there what it does.",
        ) from error


def wanted_servers(
    database: Connection, nodes: Nodes, used: Collection[str], placement: Placement, *, store_password: bool
) -> list[ForeignServer]:
    """Returns the nodes whose servers will be read.

    If the other nodes' passwords are stored, a new node's password, if any, is stored as well.

    Raises:
        BadArgument: with ``store_password``, shardids logged in to a node without a password.
    """
    there = _logins(database)
    servers = []
    for node in placement.nodes.values():
        name = statements.server_name(node.name)
        if name not in used:
            continue
        password = None
        if store_password or (any(there.values()) and name not in there):
            password = password_of(nodes, node, must_have=store_password)
        url = parse_url(node.url)
        servers.append(
            ForeignServer(
                name=name,
                options=statements.server_options(url),
                user=role_of(url),
                password=password,
            )
        )
    return servers


def password_of(nodes: Nodes, node: Node, *, must_have: bool) -> str | None:
    """Returns the password with which this machine logs in to a node."""
    with nodes[node.name].connect() as connection:
        driver = connection.connection.driver_connection
        password = driver.info.password if isinstance(driver, psycopg.Connection) else ""
    if must_have and not password:
        raise BadArgument(
            f'node "{node.name}" was logged in to without a password, so there is none to store',
            hint="Leave --store-password out.",
        )
    return password or None


def _logins(database: Connection) -> dict[str, bool]:
    """Returns shardids' servers that the current user has a mapping for, and whether it stores a password."""
    found = database.execute(
        text("""
            select srvname,
                   exists (select from unnest(umoptions) o where starts_with(o, 'password=')) as has_password
            from pg_user_mappings where usename = current_user and starts_with(srvname, 'shardids_')""")
    )
    return {row.srvname: row.has_password for row in found}


def correct_servers(database: Connection, servers: Sequence[ForeignServer]) -> list[str]:
    """Creates missing servers and user mappings, and corrects the options of the others.

    Raises:
        MissingPrivilege: a mapping needs a password, because its owner is not a superuser.
    """
    is_superuser = bool(database.scalar(text("select rolsuper from pg_roles where rolname = current_user")))
    rows = database.execute(
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
                hint="Add --store-password, or create the mapping yourself: CREATE USER MAPPING FOR"
                f' CURRENT_USER SERVER "{server.name}" OPTIONS (user …, password …)',
            )
        done += run(database, statements.server(server, present.get(server.name)), server.password)
        if server.password is not None or server.name not in mapped:
            if server.password is not None:
                keep_out_of_logs(database)
            login = statements.user_mapping(server, is_mapped=server.name in mapped)
            done += run(database, login, server.password)
    return done


def try_servers(database: Connection, trials: Iterable[tuple[str, sql.Composable]], where: str) -> None:
    """Reads from every server, so that a wrong address or password shows before anything is committed.

    ``trials`` are the servers' names, each with a query that reads from it.

    Raises:
        StatementFailed: a server cannot be read.
    """
    for server, query in trials:
        try:
            run(database, [query])
        except (ConnectionFailed, MissingPrivilege, StatementFailed) as error:
            detail = getattr(getattr(error.__cause__, "orig", error.__cause__), "diag", None)
            reason = getattr(detail, "message_detail", None) or error.message
            raise StatementFailed(
                f"{where} can't read from {server}: {reason}",
                hint="The address in the node's URL must work from there too. Where a password is asked for,"
                " or the view's owner is no superuser, it has to be stored: --store-password.",
            ) from error


def present_columns(database: Connection, name: str) -> list[tuple[str, str]] | None:
    """Returns names and types of a view's columns except the shard; ``None`` if there is no such view."""
    rows = database.execute(
        text("""
            select a.attname, format_type(a.atttypid, a.atttypmod)
            from pg_class c
            join pg_namespace n on n.oid = c.relnamespace and n.nspname = :schema
            join pg_attribute a on a.attrelid = c.oid and a.attnum > 1 and not a.attisdropped
            where c.relname = :name and c.relkind = 'v' order by a.attnum"""),
        {"schema": statements.SCHEMA, "name": name},
    ).all()
    return [(row[0], row[1]) for row in rows] or None


def unused_servers(database: Connection) -> Iterator[sql.Composable]:
    """Drops the servers of shardids that no table uses."""
    names = database.scalars(
        text("""
            select s.srvname from pg_foreign_server s
            where starts_with(s.srvname, 'shardids_')
              and not exists (select from pg_foreign_table f where f.ftserver = s.oid)""")
    ).all()
    for name in names:
        yield sql.SQL("drop server {} cascade").format(sql.Identifier(name))


def run(connection: Connection, queries: Iterable[sql.Composable], password: str | None = None) -> list[str]:
    """Runs statements; returns them without the password."""
    done = []
    for query in queries:
        statement = query.as_string()
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)
        done.append(statement.replace(password, _HIDDEN) if password else statement)
    return done
