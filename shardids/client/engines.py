"""An SQLAlchemy engine, so a connection pool, for each node; and the same engine as seen from its shards."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.forks import in_child
from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url, with_login_of
from shardids.client.reflection import ShardInspector
from shardids.client.routing.claiming import mark_writes
from shardids.client.routing.fanout import heed_stand_ins


class NodeEngines:
    """Engines made when they are first asked for, in any thread; nodes are logged in to as ``login`` says.

    ``schema_of`` returns the name of a shard's schema. ``on_made`` is called with each new engine.
    """

    def __init__(
        self,
        login: URL,
        options: dict[str, Any],
        *,
        schema_of: Callable[[int], str],
        on_made: Callable[[Node, Engine], object] | None = None,
    ) -> None:
        self._login = login
        self._on_made = on_made
        self._options = options
        self._schema_of = schema_of
        self._of_nodes: dict[Node, Engine] = {}
        self._of_shards: dict[int, tuple[Node, Engine]] = {}
        self._new_lock()
        in_child(self, NodeEngines._new_lock)

    def of(self, node: Node) -> Engine:
        """Returns the engine, with its pool, of a node."""
        known = self._of_nodes.get(node)
        if known is not None:
            return known
        with self._lock:
            if node not in self._of_nodes:
                url = with_login_of(parse_url(node.url), self._login)
                engine = open_engine(url, what=f'node "{node.name}"', **self._options)
                heed_stand_ins(engine)
                mark_writes(engine)
                dialect: Any = engine.dialect
                dialect.inspector = ShardInspector
                if self._on_made is not None:
                    self._on_made(node, engine)
                self._of_nodes[node] = engine
            return self._of_nodes[node]

    def of_shard(self, shard: int, node: Node) -> Engine:
        """Returns the node's engine as seen from a shard: models without a schema are in the shard's."""
        known = self._of_shards.get(shard)
        if known is not None and known[0] is node:
            return known[1]
        engine = self.of(node).execution_options(schema_translate_map={None: self._schema_of(shard)})
        self._of_shards[shard] = (node, engine)
        return engine

    def for_copying(self) -> NodeEngines:
        """Returns engines of psycopg's blocking mode, with the same logins and ``connect_args``.

        For one copy: a connection a node.
        """
        arguments = dict(self._options.get("connect_args", {}))
        options = {"connect_args": arguments, "pool_size": 1}
        return NodeEngines(self._login, options, schema_of=self._schema_of)

    def for_claims(self) -> NodeEngines:
        """Returns engines of psycopg's blocking mode, with the same logins, in autocommit mode.

        Their connections are others than the sessions', so that nobody waits for one while holding one; and
        given up when the server falls silent, so that nobody holds written rows for as long as it does.
        """
        kept = ("connect_args", "max_overflow", "pool_pre_ping", "pool_recycle", "pool_size", "pool_timeout")
        options = {name: self._options[name] for name in kept if name in self._options}
        options["connect_args"] = dict(options.get("connect_args", {}))
        return NodeEngines(
            self._login,
            options
            | {"isolation_level": "AUTOCOMMIT", "connect_timeout_s": CONNECT_TIMEOUT_S, "is_watched": True},
            schema_of=self._schema_of,
            on_made=self._on_made,
        )

    def made(self) -> list[Engine]:
        """Returns the engines of nodes that have been asked for."""
        with self._lock:
            return list(self._of_nodes.values())

    def dispose(self) -> None:
        """Closes all connections."""
        with self._lock:
            for engine in self._of_nodes.values():
                engine.dispose()
            self._of_nodes.clear()
            self._of_shards.clear()

    def _new_lock(self) -> None:
        # Also in the child of a fork, where a thread that does not exist there may hold the old one.
        self._lock = Lock()
