"""The cluster of a test run, on a named server or an embedded one, and sessions of its tests."""

from __future__ import annotations

import asyncio
import os
import secrets
import string
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg import sql
from sqlalchemy import MetaData
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from shardids.catalog.rows import Catalog
from shardids.client.async_cluster import AsyncCluster
from shardids.client.cluster import Cluster
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
from shardids.testing.held import held_nodes

T = TypeVar("T")

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
        stack.enter_context(held_nodes.kept())
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


@contextmanager
def rolled_back_session(cluster: Cluster, options: Mapping[str, Any]) -> Iterator[Session]:
    """Yield a session over all shards, within :meth:`~shardids.testing.held.HeldNodes.rolled_back`.

    ``options`` are those of :meth:`shardids.Cluster.sharded_session`.
    """
    session = cluster.sharded_session(**options)
    try:
        yield session
    finally:
        held_nodes.end()
        session.close()


@contextmanager
def async_cluster(catalog_url: str) -> Iterator[AsyncCluster]:
    """Yield a cluster for asyncio that belongs to no event loop, for tests that are rolled back."""
    cluster = _awaited(AsyncCluster.connect(catalog_url, listen=False))
    try:
        yield cluster
    finally:
        _awaited(cluster.close())


@contextmanager
def async_rolled_back_session(cluster: AsyncCluster, options: Mapping[str, Any]) -> Iterator[AsyncSession]:
    """Yield an ``AsyncSession`` as :func:`rolled_back_session` does; ``class_`` is its ``Session``."""
    given = {"sync_session_class" if name == "class_" else name: one for name, one in options.items()}
    session: AsyncSession = cluster.sharded_session(**given)
    try:
        yield session
    finally:
        held_nodes.end()
        _awaited(session.close())


def _awaited(work: Coroutine[Any, Any, T]) -> T:
    """Await something outside the test's event loop, which may not run, and may be another for each test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
