"""What a view needs in its own database: servers, user mappings, and what is there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.connections import (
    CONNECT_TIMEOUT_S,
    keep_out_of_logs,
    parse_url,
    role_of,
    with_password_of,
)
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.errors import BadArgument, ConnectionFailed, MissingPrivilege, StatementFailed
from shardids.install.provision import node_engine
from shardids.views import statements
from shardids.views.statements import Plan, Server

_HIDDEN = "…"


def server_of(catalog: Catalog, node: Node, *, store_password: bool, must_have: bool) -> Server:
    """A node as a foreign server, with the password that this machine logs in with if it is to be stored.

    Raises:
        BadArgument: there is no password to store, and it ``must_have`` one.
    """
    url = with_password_of(parse_url(node.url), catalog.url)
    password = None
    if store_password:
        engine = node_engine(node, catalog.url, connect_timeout_s=CONNECT_TIMEOUT_S)
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            password = driver.info.password if isinstance(driver, psycopg.Connection) else ""
        engine.dispose()
        if must_have and not password:
            raise BadArgument(
                f'node "{node.name}" was logged in to without a password: there is none to store',
                hint="Leave --store-password out.",
            )
    return Server(
        name=statements.server_name(node.name),
        options=statements.server_options(url),
        user=role_of(url),
        password=password or None,
    )


def logins(home: Connection) -> dict[str, bool]:
    """The servers of ours that the current user has a mapping for, and whether it holds a password."""
    found = home.execute(
        text("""
            select srvname,
                   exists (select from unnest(umoptions) o where starts_with(o, 'password=')) as has_password
            from pg_user_mappings where usename = current_user and starts_with(srvname, 'shardids_')""")
    )
    return {row.srvname: row.has_password for row in found}


def correct_servers(home: Connection, servers: Sequence[Server]) -> list[str]:
    """Makes the servers and user mappings that are missing, and corrects the options of the others.

    Raises:
        MissingPrivilege: a mapping would need a password, for its owner is no superuser.
    """
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
        done += run(home, statements.server(server, present.get(server.name)), server.password)
        if server.password is not None or server.name not in mapped:
            if server.password is not None:
                keep_out_of_logs(home)
            login = statements.user_mapping(server, is_mapped=server.name in mapped)
            done += run(home, login, server.password)
    return done


def try_servers(home: Connection, plan: Plan, where: str) -> None:
    """Reads from every server: a wrong address or password shows before anything is committed.

    Raises:
        StatementFailed: one can't be read.
    """
    for server, query in statements.trials(plan):
        try:
            run(home, [query])
        except (ConnectionFailed, MissingPrivilege, StatementFailed) as error:
            detail = getattr(getattr(error.__cause__, "orig", error.__cause__), "diag", None)
            reason = getattr(detail, "message_detail", None) or error.message
            raise StatementFailed(
                f"{where} can't read from {server}: {reason}",
                hint="The address in the node's URL must hold from there, too; and only superusers log in"
                " without a stored password (--store-password).",
            ) from error


def present_columns(home: Connection, name: str) -> list[tuple[str, str]] | None:
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


def unused_servers(home: Connection) -> Iterator[sql.Composable]:
    """Drops servers of ours that no table uses."""
    names = home.scalars(
        text("""
            select s.srvname from pg_foreign_server s
            where starts_with(s.srvname, 'shardids_')
              and not exists (select from pg_foreign_table f where f.ftserver = s.oid)""")
    ).all()
    for name in names:
        yield sql.SQL("drop server {} cascade").format(sql.Identifier(name))


def run(connection: Connection, queries: Iterable[sql.Composable], password: str | None = None) -> list[str]:
    """Runs statements; returns them, the password left out."""
    done = []
    for query in queries:
        statement = query.as_string()
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)
        done.append(statement.replace(password, _HIDDEN) if password else statement)
    return done
