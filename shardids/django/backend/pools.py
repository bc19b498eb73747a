"""One pool of connections per node, which the aliases of its shards share."""

from __future__ import annotations

import atexit
from threading import Lock
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg_pool import ConnectionPool
from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from shardids.catalog.topology import Node
from shardids.client.breaker import Breaker
from shardids.client.engines import substitute
from shardids.django.aliases import configuration, get_cluster
from shardids.pg.connections import CONNECT_TIMEOUT_S, in_child
from shardids.pg.urls import parse_url, with_login_of

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
    """Return the pool of a node. ``wrapper``, an alias of one of its shards, says how to connect.

    Those of nodes that are no longer there, or at another address, are closed.
    """
    if (instead := substitute()) is not None:
        pool: ConnectionPool[Any] = instead.pool(wrapper.get_connection_params(), wrapper.configure)
        return pool
    if node not in _pools.of_nodes:
        known = get_cluster().placement.nodes.values()
        for gone in [one for one in list(_pools.of_nodes) if one not in known]:
            close(gone)
    with _pools.lock:
        if node not in _pools.of_nodes:
            options = {"min_size": 0, "max_size": 10, **configuration().get("POOL", {})}
            _pools.of_nodes[node] = ConnectionPool(
                kwargs={**wrapper.get_connection_params(), "autocommit": True},
                connection_class=_counted(get_cluster()._breakers.of(node)),
                configure=wrapper.configure,
                name=f"shardids {node.name}",
                open=False,
                **options,
            )
        return _pools.of_nodes[node]


def is_of_others(connection: Any) -> bool:
    """Return whether a connection is real in a test that is rolled back, or remains from such a test."""
    return isinstance(connection._pool, ConnectionPool) is (substitute() is not None)


def _counted(breaker: Breaker) -> type[psycopg.Connection[Any]]:
    """Return psycopg's class of connections, with a breaker that counts the pool's attempts."""

    class Counted(psycopg.Connection[Any]):
        @classmethod
        def connect(cls, *arguments: Any, **options: Any) -> Any:
            with breaker.counting():
                return super().connect(*arguments, **options)

    return Counted


def admit(node: Node, arguments: dict[str, Any]) -> None:
    """Refuse a node that is down, or see whether it is back: its pool may wait long for the next attempt.

    Raises:
        NodeDown: it is down.
        psycopg.Error: it still does not answer.
    """
    breaker = get_cluster()._breakers.of(node)
    is_probe = breaker.admit()
    if is_probe or breaker.is_in_doubt:
        with breaker.counting(is_probe=is_probe):
            psycopg.connect(**arguments).close()
        close(node)


def close(node: Node) -> None:
    """Close the pool of a node, if there is one."""
    with _pools.lock:
        pool = _pools.of_nodes.pop(node, None)
    if pool is not None:
        pool.close()


def close_all() -> None:
    """Close the pools of all nodes."""
    _pools.close()


def address(node: Node) -> dict[str, Any]:
    """Return psycopg's arguments for a node; it is logged in to as the catalog is."""
    url = with_login_of(parse_url(node.url), parse_url(configuration()["CATALOG"]))
    return {"connect_timeout": CONNECT_TIMEOUT_S, **arguments_of(url)}


def arguments_of(url: URL) -> dict[str, Any]:
    """Return psycopg's arguments for a URL."""
    dialect: Any = PGDialect_psycopg  # which has no types
    _, arguments = dialect().create_connect_args(url)
    return dict(arguments)
