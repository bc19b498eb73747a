"""Tells every node where the others are, so that the triggers of strict look-ups can claim there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.connections import keep_out_of_logs
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement
from shardids.catalog.urls import parse_url, role_of
from shardids.errors import (
    ClusterConflict,
    ConnectionFailed,
    MissingPrivilege,
    ShardidsError,
    StatementFailed,
)
from shardids.lookups import dblink
from shardids.lookups.dblink import PREFIX
from shardids.views.database import lock, password_of, run, try_servers
from shardids.views.statements import address_options, changed_options, options_of

_SESSION: Final = {
    "application_name": "shardids claims",
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "options": r"-c default_transaction_isolation=read\ committed -c lock_timeout=5s -c statement_timeout=10s"
    " -c DateStyle=ISO -c bytea_output=hex",
}
"""Of a host that does not answer, the statement that claims says so within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Server:
    """A node as a server of dblink; ``password`` is ``None`` where none is to be stored."""

    node: str
    options: Mapping[str, str]
    user: str
    password: str | None

    @property
    def name(self) -> str:
        return PREFIX + self.node

    @property
    def connection(self) -> str:
        """Returns the name of a session's connection to it: another one when its address is another."""
        address = repr((sorted(self.options.items()), self.user))
        return f"shardids_{_short(self.name)}_{_short(address)}"


class PartlyTold(StatementFailed):
    """A node knows where each shard is, and could not log in to some of the other nodes."""


def refresh(
    catalog: Catalog, *, store_password: bool = False, dry_run: bool = False
) -> dict[str, ShardidsError]:
    """Tells every node where each shard is; without strict look-ups, takes away what told it.

    Args:
        catalog: the cluster's catalog.
        store_password: store the nodes' passwords in the user mappings.
        dry_run: do all of it on each node, and roll back.

    Returns:
        The nodes where it failed, each with the error; nothing was changed there, or, with
        :class:`PartlyTold`, the node knows where each shard is and could not log in to some others.
    """
    nodes_ = catalog.nodes()
    own = "shardids lookup"
    with (
        Nodes(nodes_, catalog.url, application_name=own) as nodes,
        # Others than those, of which a node has one: nobody waits for a connection while holding one.
        Nodes(nodes_, catalog.url, application_name=own) as logins,
    ):

        def tell(name: str, _engine: object) -> None:
            with nodes[name].connect() as connection, connection.begin() as transaction:
                lock(connection, f'node "{name}"')
                # Read under the lock, so that the second of two callers has the newer one.
                is_strict = any(one.is_strict for one in catalog.lookups().values())
                untried = []
                if is_strict:
                    untried = _tell(connection, logins, catalog.placement(), store_password=store_password)
                else:
                    _forget(connection, keep=())
                if dry_run:
                    transaction.rollback()
            if untried:
                # Of what was committed: the node is to claim where it can.
                raise PartlyTold(
                    f'node "{name}": ' + "; ".join(untried), hint=f"{_LATER[:1].upper()}{_LATER[1:]}"
                )

        asked = nodes.each(tell)
    return dict(asked.failures)


def follow_placement(catalog: Catalog) -> tuple[str, ...]:
    """Tells every node after a change of the placement; returns a line about each where that failed."""
    try:
        if not any(one.is_strict for one in catalog.lookups().values()):
            return ()
        failed = refresh(catalog)
    except ShardidsError as error:
        return (f"nodes were not told where shards are, for strict look-ups: {error.message}; {_LATER}",)
    return tuple(
        f"strict look-ups claim where they can: {error.message}; {_LATER}"
        if isinstance(error, PartlyTold)
        else f'node "{name}" was not told where shards are, and its strict look-ups refuse what they'
        f" can't claim: {error.message}; {_LATER}"
        for name, error in failed.items()
    )


_LATER: Final = "when that is repaired: shardids lookup refresh"


def faulty_nodes(catalog: Catalog) -> dict[str, str]:
    """Returns what is wrong with strict look-ups on the nodes that answer, by node.

    Triggers there look for a shard elsewhere than where it is, or others reach their connections.
    """
    placement = catalog.placement()
    if not any(one.is_strict for one in placement.lookups.values()):
        return {}
    wanted = dict(placement.node_of)
    with Nodes(
        placement.nodes, catalog.url, application_name="shardids lookup", read_only=catalog.read_only
    ) as nodes:

        def fault(name: str, _engine: object) -> str | None:
            with nodes[name].connect() as connection:
                servers = {s.node: s.options for s in _servers(placement)}
                there = connection.execute(
                    text("""
                        select p.shard, p.node, s.srvoptions from shardids.lookup_place p
                        left join pg_foreign_server s on s.srvname = p.server""")
                ).all()
                if {row.shard: row.node for row in there} != wanted or any(
                    _parsed(row.srvoptions or ()) != servers[row.node] for row in there
                ):
                    return "it does not know where every shard is"
                owner, _ = dblink.engine_owner(connection)
                return "; ".join(dblink.strangers(connection, owner)) or None

        answers = nodes.each(fault, placement.by_node()).results
    return {name: what for name, what in answers.items() if what is not None}


def _servers(placement: Placement) -> Iterator[_Server]:
    """Yields the nodes as servers, without passwords."""
    for node in placement.nodes.values():
        url = parse_url(node.url)
        yield _Server(
            node=node.name, options=address_options(url) | _SESSION, user=role_of(url), password=None
        )


def _tell(connection: Connection, logins: Nodes, placement: Placement, *, store_password: bool) -> list[str]:
    """Tells a node; returns why it could not log in to others, whose user mappings are left as they are."""
    prepare(connection)
    owner, is_superuser = dblink.engine_owner(connection)
    dblink.make(connection, owner)
    mapped = {
        row.srvname: row.has_password
        for row in connection.execute(
            text("""
                select srvname, exists (select from unnest(umoptions) o where starts_with(o, 'password=')) as
                       has_password
                from pg_user_mappings where usename = :owner and starts_with(srvname, :prefix)"""),
            {"owner": owner, "prefix": PREFIX},
        )
    }
    needs_password = store_password or any(mapped.values())
    servers, silent = [], dict[str, str]()
    for without in _servers(placement):
        server, is_mapped, name = without, without.name in mapped, without.node
        if needs_password:
            try:
                password = password_of(logins, placement.nodes[name], must_have=store_password)
                server = replace(without, password=password)
            except ConnectionFailed as error:
                silent[name] = error.message
        if (
            name not in silent
            and not is_superuser
            and server.password is None
            and not mapped.get(server.name)
        ):
            raise MissingPrivilege(
                f'{server.name}: dblink lets role "{owner}", which is no superuser, log in to other servers'
                " with a stored password alone",
                hint="Add --store-password.",
            )
        _correct(connection, server, owner, is_mapped=is_mapped, is_silent=name in silent)
        servers.append(server)
    _forget(connection, keep=[server.name for server in servers])
    by_node = {server.node: server for server in servers}
    connection.execute(text("delete from shardids.lookup_place"))
    connection.execute(
        text("""
            insert into shardids.lookup_place (shard, node, server, connection)
            select *
            from unnest(:shards ::integer[], :nodes ::text[], :servers ::text[], :names ::text[])"""),
        {
            "shards": list(placement.node_of),
            "nodes": list(placement.node_of.values()),
            "servers": [by_node[node].name for node in placement.node_of.values()],
            "names": [by_node[node].connection for node in placement.node_of.values()],
        },
    )
    run(connection, [sql.SQL("set local role {}").format(sql.Identifier(owner))])
    for server in servers:
        if server.node not in silent:
            try:
                with connection.begin_nested():
                    _try(connection, server)
            except StatementFailed as error:
                silent[server.node] = error.message
    return list(silent.values())


def _try(connection: Connection, server: _Server) -> None:
    """Logs in to a node as the triggers do.

    Raises:
        ClusterConflict: another node is there.
        StatementFailed: it can't be asked.
    """
    ask = sql.SQL("select a from shardids.ask_node({}, {}, 'select name from shardids.node') a").format(
        sql.Literal(server.connection), sql.Literal(server.name)
    )
    try_servers(connection, [(server.name, ask)], "a strict look-up")
    found = connection.execution_options(no_parameters=True).exec_driver_sql(ask.as_string()).scalar()
    if found != server.node:
        raise ClusterConflict(
            f'the URL of node "{server.node}" leads to node "{found}" from here',
            hint="See: shardids node list",
        )


def _correct(
    connection: Connection, server: _Server, owner: str, *, is_mapped: bool, is_silent: bool
) -> None:
    name, role = sql.Identifier(server.name), sql.Identifier(owner)
    there = connection.scalar(
        text("select coalesce(srvoptions, '{}') from pg_foreign_server where srvname = :name"),
        {"name": server.name},
    )
    if there is None:
        run(
            connection,
            [
                sql.SQL("create server {} foreign data wrapper dblink_fdw options ({})").format(
                    name, options_of(server.options)
                ),
                sql.SQL("grant usage on foreign server {} to {}").format(name, role),
            ],
        )
    elif (changes := changed_options(server.options, _parsed(there))) is not None:
        run(connection, [sql.SQL("alter server {} options ({})").format(name, changes)])
    if server.password is not None or not (is_mapped or is_silent):
        login = {"user": server.user} | ({"password": server.password} if server.password else {})
        if server.password is not None:
            keep_out_of_logs(connection)
        if is_mapped:
            run(connection, [sql.SQL("drop user mapping for {} server {}").format(role, name)])
        mapping = sql.SQL("create user mapping for {} server {} options ({})")
        run(connection, [mapping.format(role, name, options_of(login))], server.password)


def _forget(connection: Connection, *, keep: list[str] | tuple[str, ...]) -> None:
    """Drops the servers that are not kept; without any, nothing is known of the shards any more."""
    names = connection.scalars(
        text("""
            select s.srvname from pg_foreign_server s join pg_foreign_data_wrapper w on w.oid = s.srvfdw
            where starts_with(s.srvname, :prefix) and w.fdwname = 'dblink_fdw'
              and s.srvname <> all (:keep)"""),
        {"prefix": PREFIX, "keep": list(keep)},
    ).all()
    run(connection, [sql.SQL("drop server {} cascade").format(sql.Identifier(name)) for name in names])
    if not keep:
        connection.execute(text("delete from shardids.lookup_place"))


def _parsed(options: Iterable[str]) -> dict[str, str]:
    return dict(option.split("=", 1) for option in options)


def _short(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:12]
