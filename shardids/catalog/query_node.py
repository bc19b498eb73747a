"""The query node as the catalog records it: which database has a view of every table over all shards."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryNode:
    """A node of the cluster, or the database at ``url``.

    Attributes:
        node: the node's name.
        url: the database, if it is not a node.
        sharded: tables whose rows are each in one shard, though no ID in them says so.
        reference: tables that have the same rows in every shard.
    """

    node: str | None
    url: str | None
    sharded: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Returns the place in words."""
        return f'node "{self.node}"' if self.node else str(self.url)

    def address(self, placement: Placement) -> Node:
        """Return what to connect to."""
        if self.node is not None:
            return placement.nodes[self.node]
        return Node(name="query-node", url=str(self.url))


def query_node_of(catalog: Catalog) -> QueryNode | None:
    """Return the cluster's query node, if it has one."""
    with catalog.engine.connect() as connection:
        return query_node_in(connection)


def query_node_in(connection: Connection) -> QueryNode | None:
    """Return the same as :func:`query_node_of`; none if the catalog is older than query nodes."""
    if connection.scalar(text("select to_regclass('shardids_catalog.query_node') is null")):
        return None
    row = connection.execute(
        text("select node, url, sharded, reference from shardids_catalog.query_node")
    ).one_or_none()
    if row is None:
        return None
    return QueryNode(node=row.node, url=row.url, sharded=tuple(row.sharded), reference=tuple(row.reference))
