"""The two nodes of a move: connections to them, and how their servers and programs reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, text

from shardids.catalog.connections import keep_commits, open_engine, parse_url, with_password_of
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Node, schema_name

_PASSED_ON = ("host", "hostaddr", "port", "user", "dbname", "sslmode", "application_name")
"""Parameters that mean the same on another machine; files of certificates and passwords don't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One node of a move."""

    node: Node
    engine: Engine

    def close(self) -> None:
        """Closes the connections."""
        self.engine.dispose()

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """A connection of its own, each statement its own transaction."""
        with self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def parameters(self) -> dict[str, str]:
        """libpq's parameters to connect here from another process, password included where one was used."""
        with self.engine.connect() as connection:
            info = driver_connection(connection).info
            found = {name: value for name, value in info.get_parameters().items() if name in _PASSED_ON}
            found |= {"host": info.host, "port": str(info.port), "dbname": info.dbname, "user": info.user}
            return found | ({"password": info.password} if info.password else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Where a shard is moved from and to. ``schema`` is the shard's on both."""

    shard: int
    schema: str
    source: Side
    target: Side

    def close(self) -> None:
        """Closes the connections."""
        self.source.close()
        self.target.close()


def sides_of(catalog: Catalog, shard: int, source: str, target: str, *, name: str) -> Sides:
    """Both nodes of a move; nothing is connected yet. Sessions there bear ``name``.

    Raises:
        ClusterConflict: a node is not in the catalog any more.
    """
    prefix = catalog.describe().schema_prefix
    return Sides(
        shard=shard,
        schema=schema_name(prefix, shard),
        source=side_of(catalog, source, name=name),
        target=side_of(catalog, target, name=name),
    )


def side_of(catalog: Catalog, node: str, *, name: str) -> Side:
    """One node; nothing is connected yet. Sessions there bear ``name``.

    Raises:
        ClusterConflict: there is no such node.
    """
    nodes = catalog.nodes()
    if node not in nodes:
        raise unknown_node(node, nodes)
    url = with_password_of(parse_url(nodes[node].url), catalog.url)
    engine = open_engine(
        url,
        what=f'node "{node}"',
        administrative=True,
        pool_pre_ping=True,
        connect_args={"application_name": name},
    )
    keep_commits(engine)
    return Side(node=nodes[node], engine=engine)


def end_sessions(side: Side, name: str) -> None:
    """Ends the other sessions of clients that bear a name, and waits for their end."""
    with side.autocommit() as connection:
        connection.execute(
            text("""
                select pg_terminate_backend(pid, 10000) from pg_stat_activity
                where application_name = :name and pid <> pg_backend_pid()
                  and backend_type = 'client backend'"""),
            {"name": name},
        )


def driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    """psycopg's own connection below SQLAlchemy's."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(f"psycopg is needed, not {type(driver).__name__}")
    return driver


def server_major(connection: Connection) -> int:
    """The major version of the server: 18."""
    return driver_connection(connection).info.server_version // 10000
