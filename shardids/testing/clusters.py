"""The cluster of a test run, on a named server or an embedded one, and a session that never commits."""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, MetaData
from sqlalchemy.engine import URL

from shardids.catalog.lookups import Value
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.client.cluster import Cluster
from shardids.client.lookups import Claims, OwnRows
from shardids.client.routing.sessions import RoutedSession, session_class
from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.migrate.install import provision
from shardids.models.columns import is_reference
from shardids.models.lookups import lookups_of
from shardids.pg.connections import translate
from shardids.pg.embedded import temporary_server
from shardids.pg.urls import parse_url, shown_url
from shardids.tables import lookups, references, views
from shardids.testing.devcluster import MOST_NODES

_NO_WORKER: Final = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWishes:
    """The cluster of a test run: one that exists, or one of this layout and size.

    Attributes:
        catalog: the catalog of the cluster that is there, or ``None``.
        server: the server to make databases on, or ``None`` for an embedded one.
    """

    layout: Layout
    shards: int
    nodes: int
    catalog: URL | None
    server: URL | None

    @classmethod
    def parse(cls, settings: Mapping[str, str], *, workers: int) -> Self:
        """Read the settings of a run with so many workers.

        Raises:
            BadArgument: one can't be read or is out of range, both a catalog and a server are named, or
                several workers would share a cluster.
        """
        layout = Layout.parse(settings["layout"])
        catalog, server = settings["catalog"], settings["server"]
        if catalog and server:
            raise BadArgument("name either a catalog or a server for the tests' cluster, not both")
        if catalog and workers > 1:
            raise BadArgument(
                f"{workers} workers can't share the cluster of one catalog: they would wait for each other's"
                " rows",
                hint="Name a server instead (--shardids-server): each worker makes its own databases there.",
            )
        return cls(
            layout=layout,
            shards=_count("shardids_shards", settings["shards"], layout.shard_limit),
            nodes=_count("shardids_nodes", settings["nodes"], MOST_NODES),
            catalog=parse_url(catalog) if catalog else None,
            server=parse_url(server) if server else None,
        )


def _count(name: str, text: str, highest: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= highest:
        raise BadArgument(f"{name} = {text} is not a number from 1 to {highest}")
    return int(text)


@contextmanager
def catalog_for_tests(wishes: ClusterWishes) -> Iterator[str]:
    """Yield the URL of a cluster's catalog; objects made for it are dropped at the end.

    Raises:
        ServerStartFailed: no embedded server is installed.
        ConnectionFailed, MissingPrivilege: as they say.
    """
    with ExitStack() as stack:
        if wishes.catalog is not None:
            url = wishes.catalog
        else:
            server = wishes.server or parse_url(stack.enter_context(temporary_server()).url())
            names = string.ascii_lowercase[: wishes.nodes]
            nodes = {name: stack.enter_context(_database(server, name)) for name in names}
            url = nodes["a"]
            _provision(wishes, nodes)
        yield _with_password(url)


@contextmanager
def tables_of(metadata: MetaData, cluster: Cluster, catalog_url: str) -> Iterator[None]:
    """Create the models' tables in every shard, their look-ups and counters, and their reference tables.

    Reference tables, and tables that may refer to them, are dropped at the end: a database that replicates
    can't be dropped.
    """
    tables = metadata.sorted_tables
    referred = [table for table in tables if is_reference(table)]
    own = [table for table in tables if table not in referred]
    writer = min(cluster.placement.nodes)

    def in_shards(change: Callable[..., None]) -> None:
        for shard in cluster.placement.all_shards():
            with cluster.at(shard=shard).engine.begin() as connection:
                change(connection, tables=own)

    with closing(Catalog(catalog_url)) as catalog, ExitStack() as stack:
        for table in referred:
            references.create_table(catalog, table.name, writer=writer, models=metadata)
            stack.callback(references.drop_table, catalog, table.name)
        if referred:
            stack.callback(in_shards, metadata.drop_all)
        in_shards(metadata.create_all)
        for lookup in (lookup for table in tables for lookup in lookups_of(table)):
            lookups.create(catalog, str(lookup))
            lookups.backfill(catalog, str(lookup))
        cluster.refresh()
        yield


def _provision(wishes: ClusterWishes, nodes: Mapping[str, URL]) -> None:
    catalog = Catalog(nodes["a"])
    try:
        provision.init(catalog, wishes.layout, wishes.shards)
        for name, url in nodes.items():
            provision.add_node(catalog, name, _with_password(url))
        provision.create_shards(catalog, range(wishes.shards))
        views.found_query_node(catalog, node="a", store_password=True)
    finally:
        catalog.close()


@contextmanager
def _database(server: URL, node: str) -> Iterator[URL]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", _NO_WORKER)
    name = f"shardids_tests_{worker}_{secrets.token_hex(6)}_{node}"
    _execute(server, sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    try:
        yield server.set(database=name)
    finally:
        _execute(server, sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def _execute(server: URL, statement: sql.Composed) -> None:
    try:
        with psycopg.connect(_with_password(server), autocommit=True) as connection:
            connection.execute(statement)
    except psycopg.Error as error:
        raise translate(error, what=f"server {shown_url(server)}", url=server) or error from error


def _with_password(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


class _HeldNodes:
    """A cluster as a session sees it, except its engines: one connection per node, in its transaction."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self._held: dict[Node, Connection] = {}
        self._query_node: Node | None = None
        self.claims = Claims(
            cluster._followed,
            self._for_claims,
            shard_count=cluster.shard_count,
            schema_of=cluster.schema_of,
            rows=_HeldRows(self._for_claims, cluster.schema_of),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def query_node(self) -> Node | None:
        """Return the query node, if there is one: sessions read from it, over separate connections."""
        found = self._cluster.query_node()
        self._query_node = None if found is None else replace(found)
        return self._query_node

    def engine(self, node: Node) -> Connection | Engine:
        """Return the node's connection, which SQLAlchemy takes for an engine."""
        if node is self._query_node:
            return self._cluster.engine(node)
        if node not in self._held:
            connection = self._cluster.engine(node).connect()
            # Closing it rolls back.
            self._stack.callback(connection.close)
            connection.begin()
            self._held[node] = connection
        return self._held[node]

    def _for_claims(self, node: Node) -> Any:
        return _InSavepoints(self.engine(node))


class _InSavepoints:
    """An engine as claims use it; a connection is a savepoint of the test's transaction."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._held.begin_nested():
            yield self._held


class _HeldRows(OwnRows):
    """Rows as the test's transaction sees them: nobody else writes, so nobody is waited for."""

    def with_values(self, *where: Any, lock_ms: int | None = None) -> Sequence[Value]:
        """Read them: see :class:`shardids.client.lookups.Rows`."""
        return super().with_values(*where)


@contextmanager
def rolled_back(cluster: Cluster, options: Mapping[str, Any]) -> Iterator[RoutedSession]:
    """Yield a session whose work on every node is rolled back at the end, commits included.

    Its transactions are savepoints. ``options`` are those of :meth:`shardids.Cluster.sharded_session`.

    Raises:
        BadArgument: ``twophase``, which needs a real COMMIT.
    """
    if options.get("twophase"):
        raise BadArgument(
            "a session that is rolled back can't have twophase=True, which needs a real COMMIT",
            hint="Open one with cluster.sharded_session(), and delete its rows.",
        )
    made: Any = session_class(RoutedSession, options.get("class_"))
    given = {name: value for name, value in options.items() if name != "class_"}
    with ExitStack() as stack:
        held: Any = _HeldNodes(cluster, stack)
        with made(held, **given, join_transaction_mode="create_savepoint") as session:
            yield session
