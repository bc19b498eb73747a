"""A session over all shards in one transaction a node that is never committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from sqlalchemy import Connection

from shardids.catalog.topology import Node
from shardids.client.cluster import Cluster
from shardids.client.routing import RoutedSession, session_class
from shardids.errors import BadArgument

_SEES_COMMITTED: Final = {"twophase": False, "engine": "merge"}


class _HeldNodes:
    """A cluster as a session sees it, but for its engines: a connection a node, in its transaction."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self._held: dict[Node, Connection] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def engine(self, node: Node) -> Connection:
        """Returns the node's connection, which SQLAlchemy takes for an engine."""
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
        BadArgument: ``twophase``, or an ``engine`` other than ``"merge"``: both need a real COMMIT.
    """
    for name, only in _SEES_COMMITTED.items():
        if options.get(name, only) != only:
            raise BadArgument(
                f"a session that is rolled back can't have {name}={options[name]!r}, which needs a real"
                " COMMIT",
                hint="Open one with cluster.sharded_session(), and delete what it wrote.",
            )
    made: Any = session_class(RoutedSession, options.get("class_"))
    given = {name: value for name, value in options.items() if name != "class_"}
    with ExitStack() as stack:
        held: Any = _HeldNodes(cluster, stack)
        with made(held, **given, join_transaction_mode="create_savepoint") as session:
            yield session
