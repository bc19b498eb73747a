"""The views that the catalog records, where each reads the shards, and whether that fits the placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids.catalog.queries import read
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url
from shardids.views.statements import server_name, server_options


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view as the catalog records it, on a node or in the database at ``url``."""

    name: str
    table_name: str
    id_column: str
    node: str | None
    url: str | None

    @property
    def where(self) -> str:
        """Returns the place in words."""
        return f'node "{self.node}"' if self.node else str(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSource:
    """Where a view reads one shard: a row of ``views/state.v1.sql``. No server means its own database."""

    view_name: str
    shard: int
    server: str | None
    server_options: list[str] | None

    @property
    def options(self) -> dict[str, str]:
        """Returns the options of the server."""
        return dict(option.split("=", 1) for option in self.server_options or ())


def views_in(connection: Connection) -> list[View]:
    """Returns the views that the catalog records, by name; none if the catalog is older than views."""
    if connection.scalar(text("select to_regclass('shardids_catalog.view') is null")):
        return []
    found = connection.execute(
        text("select name, table_name, id_column, node, url from shardids_catalog.view order by name")
    )
    return [View(**row._mapping) for row in found]


def views_of(catalog: Catalog) -> list[View]:
    """Returns the same as :func:`views_in`, in a transaction of its own."""
    with catalog.engine.connect() as connection:
        return views_in(connection)


def read_sources(connection: Connection, schema_prefix: str) -> list[ViewSource]:
    """Returns where the views of a database read each shard."""
    return read(connection, "views/state.v1", ViewSource, schema_prefix=schema_prefix)


def stale_shards(
    view: View, sources: Iterable[ViewSource], node_of: Mapping[int, str], nodes: Mapping[str, Node]
) -> list[int]:
    """Returns the shards that a view does not read from their owner, or that no longer exist."""
    addresses = {name: _address(server_options(parse_url(node.url))) for name, node in nodes.items()}
    wanted = {
        shard: (None, None) if name == view.node else (server_name(name), addresses[name])
        for shard, name in node_of.items()
    }
    there = {
        source.shard: (source.server, _address(source.options) if source.server else None)
        for source in sources
        if source.view_name == view.name
    }
    return sorted(shard for shard in wanted.keys() | there.keys() if wanted.get(shard) != there.get(shard))


def _address(options: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(options.get(name) for name in ("host", "port", "dbname"))
