"""The cluster of a test run: databases on a server that is named, else on an embedded one."""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg import sql
from sqlalchemy import MetaData
from sqlalchemy.engine import URL

from shardids import views
from shardids.catalog.connections import translate
from shardids.catalog.rows import Catalog
from shardids.catalog.urls import parse_url, shown_url
from shardids.client.cluster import Cluster
from shardids.dev.devcluster import MOST_NODES
from shardids.dev.embedded import temporary_server
from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.install import provision

_NO_WORKER: Final = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a test run asks for: a cluster that is there, or one of this layout and size.

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
        """Reads the settings of a run with so many workers.

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
def catalog_for_tests(wishes: Wishes) -> Iterator[str]:
    """Yields the URL of a cluster's catalog; what was made for it is dropped at the end.

    Raises:
        ServerStartFailed: there is no embedded server.
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


def create_tables(cluster: Cluster, metadata: MetaData) -> None:
    """Creates the models' tables in every shard."""
    for shard in cluster.placement.all_shards():
        with cluster.shard_engine(shard).begin() as connection:
            metadata.create_all(connection)


def _provision(wishes: Wishes, nodes: Mapping[str, URL]) -> None:
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
