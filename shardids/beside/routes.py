"""The addresses of shards and nodes, as the configuration of a pooler or proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import tomlkit
from sqlalchemy import text

from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict

_ROUTES: Final = text("""
    select shard, schema, node, host, port, database from shardids_catalog.route
    where state = 'active' order by shard""")
_WRITTEN: Final = 'Written by "shardids routes": changes are overwritten.'
_LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A shard, and the address of the node that holds it."""

    shard: int
    schema: str
    node: str
    host: str
    port: int
    database: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Names and addresses that a file needs beside the catalog's.

    Attributes:
        host: the address at which HAProxy listens.
        first_port: the port of shard 0 there; shard N has the N-th after it.
        database: the name of the cluster as a database of PgDog.
    """

    host: str = "127.0.0.1"
    first_port: int = 20000
    database: str = "shardids"


DEFAULTS: Final = Options()


def read_routes(catalog: Catalog) -> list[Route]:
    """Return the routes of all shards that have a home, by number. A lost shard has none.

    Raises:
        ClusterConflict: the URL of a node has no host or no database, or several hosts.
    """
    with catalog.engine.connect() as connection:
        found = connection.execute(_ROUTES).all()
    for row in found:
        if not (row.host and row.database):
            raise ClusterConflict(
                f'the URL of node "{row.node}" names no {"database" if row.host else "host"}',
                hint=f"Poolers need both: shardids node replace {row.node} --url postgresql://user@host:5432/database",
            )
        if "," in row.host + row.port:
            raise ClusterConflict(
                f'the URL of node "{row.node}" names several hosts: {row.host}',
                hint="A pooler would take any of them for the primary. Give the node one address that follows"
                " the primary, such as a virtual IP address.",
            )
    return [Route(**row._asdict() | {"port": int(row.port)}) for row in found]


def pgbouncer(routes: Sequence[Route], _options: Options = DEFAULTS) -> str:
    """Return the section ``[databases]`` of PgBouncer: one entry per node, and one per shard.

    The connections of a shard's entry serve only that shard, so that its ``search_path`` can be set when they
    are made, whatever the pool mode is.

    Raises:
        ClusterConflict: a node is called as a shard's schema or as PgBouncer's console.
    """
    schemas = {route.schema for route in routes}
    nodes = _nodes(routes)
    for name in nodes:
        if name in schemas or name == "pgbouncer":
            other = "the schema of a shard" if name in schemas else "PgBouncer's console"
            raise ClusterConflict(
                f'node "{name}" has the name of {other}: both can\'t be databases of PgBouncer',
                hint="Add a node of another name, and move the shards there: shardids shard move",
            )
    lines = [f"; {_WRITTEN}", "[databases]"]
    lines += [f"{name} = {_conninfo(route)}" for name, route in nodes.items()]
    lines += [
        f"{route.schema} = {_conninfo(route)} connect_query='set search_path = {route.schema}'"
        for route in routes
    ]
    return "\n".join(lines) + "\n"


def _conninfo(route: Route) -> str:
    values = {"host": route.host, "port": route.port, "dbname": route.database}
    return " ".join(f"{name}={_quoted(str(value))}" for name, value in values.items())


def _quoted(value: str) -> str:
    """Return a value of a connection string; PgBouncer's doubles the quotes in it."""
    return (
        value if value.replace("-", "").replace(".", "").isalnum() else "'" + value.replace("'", "''") + "'"
    )


def haproxy(routes: Sequence[Route], options: Options = DEFAULTS) -> str:
    """Return frontends and backends of HAProxy: one port per shard, one backend per node.

    Raises:
        BadArgument: a shard would have a port above 65535.
    """
    last = max((route.shard for route in routes), default=0)
    if options.first_port + last > _LAST_PORT:
        raise BadArgument(
            f"shard {last} would have port {options.first_port + last}, which is above {_LAST_PORT}",
            hint="Give shard 0 a lower port: --listen 127.0.0.1:20000",
        )
    lines = [f"# {_WRITTEN}"]
    for name, route in _nodes(routes).items():
        lines += [
            "",
            f"backend shardids_{name}",
            "    mode tcp",
            f"    server {name} {_address(route)} check",
        ]
    host = f"[{options.host}]" if ":" in options.host else options.host
    for route in routes:
        bind = f"    bind {host}:{options.first_port + route.shard}"
        lines += ["", f"frontend {route.schema}", "    mode tcp", bind]
        lines += [f"    default_backend shardids_{route.node}"]
    return "\n".join(lines) + "\n"


def _address(route: Route) -> str:
    if route.host.startswith("/"):
        return f"unix@{route.host}/.s.PGSQL.{route.port}".replace(" ", "\\ ")
    return f"[{route.host}]:{route.port}" if ":" in route.host else f"{route.host}:{route.port}"


def pgdog(routes: Sequence[Route], options: Options = DEFAULTS) -> str:
    """Return the databases and sharded schemas of PgDog, whose shards are the nodes, by name.

    Raises:
        ClusterConflict: a node's address is a directory of sockets.
    """
    nodes = _nodes(routes)
    numbers = {name: number for number, name in enumerate(nodes)}
    document = tomlkit.document()
    document.add(tomlkit.comment(_WRITTEN))
    databases, schemas = tomlkit.aot(), tomlkit.aot()
    for name, route in nodes.items():
        if route.host.startswith("/"):
            raise ClusterConflict(
                f'node "{name}" is reached by a socket in {route.host}, and PgDog connects by TCP',
                hint=f"Give it an address: shardids node replace {name} --url postgresql://user@host:5432/database",
            )
        databases.append(
            _table(
                name=options.database,
                host=route.host,
                port=route.port,
                database_name=route.database,
                shard=numbers[name],
            )
        )
    for route in routes:
        schemas.append(_table(database=options.database, name=route.schema, shard=numbers[route.node]))
    document.add("databases", databases)
    document.add("sharded_schemas", schemas)
    return tomlkit.dumps(document)


def _table(**values: str | int) -> tomlkit.items.Table:
    table = tomlkit.table()
    table.update(values)
    return table


def _nodes(routes: Sequence[Route]) -> dict[str, Route]:
    """Return one route of each node, by its name."""
    return dict(sorted({route.node: route for route in routes}.items()))


FORMATS: Final[Mapping[str, Callable[[Sequence[Route], Options], str]]] = {
    "pgbouncer": pgbouncer,
    "pgdog": pgdog,
    "haproxy": haproxy,
}
"""Each format's function of routes and options, which returns the same text for the same routes."""
