"""One pool of connections a node, which the aliases of its shards share."""

from __future__ import annotations

import atexit
from threading import Lock
from typing import TYPE_CHECKING, Any

from psycopg_pool import ConnectionPool
from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from shardids.catalog.connections import CONNECT_TIMEOUT_S
from shardids.catalog.forks import in_child
from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url, with_login_of
from shardids.django.aliases import configuration, get_cluster

if TYPE_CHECKING:
    from shardids.django.backend.base import DatabaseWrapper


class _Pools:
    def __init__(self) -> None:
        self.of_nodes: dict[Node, ConnectionPool[Any]] = {}
        self._of_the_parent: list[dict[Node, ConnectionPool[Any]]] = []
        self.lock = Lock()
        in_child(self, _Pools.leave_to_the_parent)

    def leave_to_the_parent(self) -> None:
        # The child must neither use nor close the parent's connections.
        self._of_the_parent.append(self.of_nodes)
        self.of_nodes = {}
        self.lock = Lock()

    def close(self) -> None:
        for node in list(self.of_nodes):
            close(node)


_pools = _Pools()
atexit.register(_pools.close)


def of(node: Node, wrapper: DatabaseWrapper) -> ConnectionPool[Any]:
    """Returns the pool of a node. ``wrapper``, an alias of one of its shards, says how to connect.

    Those of nodes that are no longer there, or at another address, are closed.
    """
    if node not in _pools.of_nodes:
        known = get_cluster().placement.nodes.values()
        for gone in [one for one in list(_pools.of_nodes) if one not in known]:
            close(gone)
    with _pools.lock:
        if node not in _pools.of_nodes:
            options = {"min_size": 0, "max_size": 10, **configuration().get("POOL", {})}
            _pools.of_nodes[node] = ConnectionPool(
                kwargs={**wrapper.get_connection_params(), "autocommit": True},
                configure=wrapper.configure,
                name=f"shardids {node.name}",
                open=False,
                **options,
            )
        return _pools.of_nodes[node]


def close(node: Node) -> None:
    """Closes the pool of a node, if there is one."""
    with _pools.lock:
        pool = _pools.of_nodes.pop(node, None)
    if pool is not None:
        pool.close()


def close_all() -> None:
    """Closes the pools of all nodes."""
    _pools.close()


def address(node: Node) -> dict[str, Any]:
    """Returns psycopg's arguments for a node; it is logged in to as the catalog is."""
    url = with_login_of(parse_url(node.url), parse_url(configuration()["CATALOG"]))
    return {"connect_timeout": CONNECT_TIMEOUT_S, **arguments_of(url)}


def arguments_of(url: URL) -> dict[str, Any]:
    """Returns psycopg's arguments for a URL."""
    dialect: Any = PGDialect_psycopg  # which has no types
    _, arguments = dialect().create_connect_args(url)
    return dict(arguments)
