"""A session over all shards in one transaction a node that is never committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine

from shardids.catalog.topology import Node
from shardids.client.cluster import Cluster
from shardids.client.routing import RoutedSession, session_class
from shardids.errors import BadArgument


class _HeldNodes:
    """A cluster as a session sees it, but for its engines: a connection a node, in its transaction."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self._held: dict[Node, Connection] = {}
        self._query_node: Node | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def query_node(self) -> Node | None:
        """Returns the query node, if there is one: sessions read from it, over connections of their own."""
        found = self._cluster.query_node()
        self._query_node = None if found is None else replace(found)
        return self._query_node

    def engine(self, node: Node) -> Connection | Engine:
        """Returns the node's connection, which SQLAlchemy takes for an engine."""
        if node is self._query_node:
            return self._cluster.engine(node)
        if node not in self._held:
            connection = self._cluster.engine(node).connect()
            # Closing it rolls back.
            self._stack.callback(connection.close)
            connection.begin()
            self._held[node] = connection
        return self._held[node]


@contextmanager
def rolled_back(cluster: Cluster, options: Mapping[str, Any]) -> Iterator[RoutedSession]:
    """Yields a session whose work on every node is rolled back at the end, also what it committed.

    Its transactions are savepoints. ``options`` are those of :meth:`shardids.Cluster.sharded_session`.

    Raises:
        BadArgument: ``twophase``, which needs a real COMMIT.
    """
    if options.get("twophase"):
        raise BadArgument(
            "a session that is rolled back can't have twophase=True, which needs a real COMMIT",
            hint="Open one with cluster.sharded_session(), and delete what it wrote.",
        )
    made: Any = session_class(RoutedSession, options.get("class_"))
    given = {name: value for name, value in options.items() if name != "class_"}
    with ExitStack() as stack:
        held: Any = _HeldNodes(cluster, stack)
        with made(held, **given, join_transaction_mode="create_savepoint") as session:
            yield session
