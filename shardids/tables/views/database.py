"""The query node's database: its servers, and its user mappings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes, administrative_engine
from shardids.catalog.query_node import QueryNode
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, Placement
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, MissingPrivilege, StatementFailed
from shardids.pg.connections import keep_out_of_logs
from shardids.pg.locks import AdvisoryLock
from shardids.pg.schemas import Stranger, engine_owner, own_schema, strangers_in
from shardids.pg.urls import parse_url, role_of, with_password_of
from shardids.tables.views import statements
from shardids.tables.views.statements import ForeignServer

_HIDDEN: Final = "…"
_LOCK_PATIENCE_S: Final = 60.0
"""How long to wait for another process: a refresh asks every node, and may wait for silent ones."""
_LOCK_NOT_AVAILABLE: Final = "55P03"


@contextmanager
def connection_to(catalog: Catalog, there: QueryNode, url: str | None = None) -> Iterator[Connection]:
    """Connect to the query node; ``url`` may bring its password."""
    if there.node is not None:
        address, what = catalog.existing_node(there.node).url, f'node "{there.node}"'
    else:
        address, what = url or str(there.url), "the query node"
    engine = administrative_engine(with_password_of(parse_url(address), catalog.url), what=what)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def own(database: Connection, there: QueryNode) -> None:
    """Make or check the schemas of the query node; act as their owner to the end of the transaction.

    Raises:
        MissingPrivilege: a schema, an object in it, or a server of shardids belongs to another role.
    """
    owner = engine_owner(database) if there.node is not None else ""
    for schema in statements.ON_QUERY_NODE:
        own_schema(database, schema, owner=owner)
        owner = owner or str(database.scalar(text("select current_user")))


def strangers_on(database: Connection, there: QueryNode) -> list[Stranger]:
    """Return the objects of other roles in the schemas of the query node.

    Their owner is the engine's on a node. Elsewhere it is that of schema ``shardids_query``, which a
    superuser trusts only if it is one as well.
    """
    owner = engine_owner(database) if there.node is not None else None
    owner = owner or database.scalar(
        text("""select case when o.rolsuper or not r.rolsuper then o.rolname else r.rolname end
                from pg_roles r left join pg_namespace n on n.nspname = :schema
                left join pg_roles o on o.oid = n.nspowner where r.rolname = current_user"""),
        {"schema": statements.QUERY},
    )
    return strangers_in(database, statements.ON_QUERY_NODE, str(owner))


def correct_regions(database: Connection, regions: Sequence[Region]) -> list[str]:
    """Make ``shardids_nodes.region_of`` tell these regions; return the statements that were run."""
    shown = database.scalar(
        text("select obj_description(to_regprocedure('shardids_nodes.region_of(integer)'), 'pg_proc')")
    )
    if shown == statements.shown_regions(regions) or not (shown or regions):
        return []
    return run(database, statements.region_function(regions))


def lock(database: Connection, where: str) -> None:
    """Take the lock for changes of the query node, until the end of the transaction.

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
            f"another process has been changing the query node, {where}, for {_LOCK_PATIENCE_S:g} s",
            hint="Wait for it, or look at it in pg_stat_activity there.",
        ) from error


def wanted_servers(
    database: Connection, nodes: Nodes, placement: Placement, *, store_password: bool
) -> list[ForeignServer]:
    """Return the nodes as servers.

    If the other nodes' passwords are stored, a new node's password, if any, is stored as well.

    Raises:
        BadArgument: with ``store_password``, shardids logged in to a node without a password.
    """
    there = _logins(database)
    servers = []
    for node in placement.nodes.values():
        name = statements.server_name(node.name)
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
    """Return the password that this machine logs in to a node with."""
    with nodes[node.name].connect() as connection:
        driver = connection.connection.driver_connection
        password = driver.info.password if isinstance(driver, psycopg.Connection) else ""
    if must_have and not password:
        raise BadArgument(
            f'node "{node.name}" accepts the login without a password: there is nothing to store',
            hint="Leave --store-password out.",
        )
    return password or None


def _logins(database: Connection) -> dict[str, bool]:
    """Return shardids' servers that the current user has a mapping for, and whether it stores a password."""
    found = database.execute(
        text("""
            select srvname,
                   exists (select from unnest(umoptions) o where starts_with(o, 'password=')) as has_password
            from pg_user_mappings where usename = current_user and starts_with(srvname, 'shardids_')""")
    )
    return {row.srvname: row.has_password for row in found}


def correct_servers(database: Connection, servers: Sequence[ForeignServer]) -> list[str]:
    """Create missing servers and user mappings, and correct the options of the others.

    :func:`own` has refused servers of another role, which would get the passwords.

    Raises:
        MissingPrivilege: a mapping needs a password, because its owner is not a superuser.
    """
    is_superuser, can_pass_on = database.execute(
        text("""select rolsuper, current_setting('server_version_num')::integer >= 180000
                from pg_roles where rolname = current_user""")
    ).one()
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
        there = present.get(server.name)
        is_new = server.password is None and server.name not in mapped
        if not is_superuser and is_new and not can_pass_on:
            raise MissingPrivilege(
                f"{server.name}: postgres_fdw lets only superusers log in to other servers without a stored"
                " password",
                hint=f"To store those of the nodes: {STORING}",
            )
        passes_on = server.password is None and _PASSED.items() <= (there or {}).items()
        if passes_on or (is_new and not is_superuser):
            server = replace(server, options={**server.options, **_PASSED})  # noqa: PLW2901 -- as it will be
        done += run(database, statements.server(server, there), server.password)
        if server.password is not None or server.name not in mapped:
            if server.password is not None:
                keep_out_of_logs(database)
            login = statements.user_mapping(
                server, is_mapped=server.name in mapped, is_superuser=is_superuser
            )
            done += run(database, login, server.password)
    return done


STORING: Final = "shardids query-node refresh --store-password"
_QUERY_CANCELED: Final = "57014"
_PROHIBITED: Final = "2F003"
"""postgres_fdw: the mapping of a role that is not a superuser has no password that the node asked for."""
_ASKS_PASSWORD: Final = re.compile("password|authentication")
_PASSED: Final = {"use_scram_passthrough": "true"}


def passing_on(database: Connection, servers: Sequence[ForeignServer]) -> list[sql.Composable]:
    """Return statements that let the nodes take the login of the session at the query node; since 18.

    It needs no stored password, and works for the role of the nodes' URLs, where its password's hash is
    the same on all servers.
    """
    can_pass_on = database.scalar(text("select current_setting('server_version_num')::integer >= 180000"))
    if not can_pass_on or any(server.password is not None for server in servers):
        return []
    present = database.execute(text("select srvname, srvoptions from pg_foreign_server")).all()
    options = {row.srvname: dict(one.split("=", 1) for one in row.srvoptions or ()) for row in present}
    return [
        statement
        for server in servers
        for statement in statements.server(
            replace(server, options={**server.options, **_PASSED}), options.get(server.name)
        )
    ]


def try_servers(database: Connection, trials: Iterable[tuple[str, sql.Composable]], where: str) -> None:
    """Read from every server, so that a wrong address or password shows before anything is committed.

    ``trials`` are the servers' names, each with a query that reads from it.

    Raises:
        ConnectionFailed: a server does not answer within the session's ``statement_timeout``; or the session
            has ended.
        StatementFailed: a server cannot be read.
    """
    for server, query in trials:
        try:
            run(database, [query])
        except (ConnectionFailed, MissingPrivilege, StatementFailed) as error:
            if database.invalidated:
                # This session itself has ended: that says nothing of the server.
                raise
            if isinstance(error, StatementFailed) and error.sqlstate == _QUERY_CANCELED:
                raise ConnectionFailed(
                    f"{where} gets no answer from {server}: {error.message}",
                    hint="Check from there whether the node runs and its host and port can be reached.",
                ) from error
            detail = getattr(getattr(error.__cause__, "orig", error.__cause__), "diag", None)
            reason = getattr(detail, "message_detail", None) or error.message
            asks = _ASKS_PASSWORD.search(reason) is not None or error.sqlstate == _PROHIBITED
            raise StatementFailed(
                f"{where} can't read from {server}: {reason}",
                hint=f"To store the password that the node asks for: {STORING}"
                if asks
                else "The address in the node's URL must also work from there.",
            ) from error


def unused_servers(database: Connection) -> Iterator[sql.Composable]:
    """Drop the servers of shardids that no table uses."""
    names = database.scalars(
        text("""
            select s.srvname from pg_foreign_server s
            where starts_with(s.srvname, 'shardids_')
              and s.srvowner = current_user::regrole
              and not exists (select from pg_foreign_table f where f.ftserver = s.oid)""")
    ).all()
    for name in names:
        yield sql.SQL("drop server {} cascade").format(sql.Identifier(name))


def extension_removal(database: Connection) -> Iterator[sql.Composable]:
    """Take the foreign data wrapper out of the query node's schema, or drop it if nobody uses it."""
    is_used = database.scalar(
        text("""
            select exists (select from pg_foreign_server s where s.srvfdw = w.oid)
            from pg_extension e join pg_foreign_data_wrapper w on w.fdwname = e.extname
            where e.extname = 'postgres_fdw' and e.extnamespace = to_regnamespace(:schema)"""),
        {"schema": statements.FOREIGN},
    )
    if is_used is not None:
        yield sql.SQL(
            "alter extension postgres_fdw set schema public" if is_used else "drop extension postgres_fdw"
        )


def run(connection: Connection, queries: Iterable[sql.Composable], password: str | None = None) -> list[str]:
    """Run statements; return them without the password."""
    done = []
    for query in queries:
        statement = query.as_string()
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)
        done.append(statement.replace(password, _HIDDEN) if password else statement)
    return done
