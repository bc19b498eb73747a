"""An SQLAlchemy engine, so a connection pool, for each node; and the same engine as seen from its shards.

There, ``inspect()`` shows the shard's tables, where no schema is named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import wraps
from inspect import getmembers, isfunction, signature
from threading import Lock
from typing import Any, Final, Protocol
from weakref import WeakSet

import psycopg
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.base import PGInspector
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from shardids.catalog.topology import Node
from shardids.client.breaker import Breakers
from shardids.client.routing.claiming import mark_writes
from shardids.client.routing.fanout import heed_stand_ins
from shardids.errors import ShardidsError
from shardids.pg.connections import CONNECT_TIMEOUT_S, in_child, open_engine
from shardids.pg.queries import quoted
from shardids.pg.urls import parse_url, with_login_of


class Substitute(Protocol):
    """A source of connections to nodes in place of their servers, in tests of applications."""

    def take(self, engine: Engine) -> object:
        """Give the connections of an engine of a node from now on."""

    def pool(self, arguments: dict[str, Any], configure: Callable[[Any], object]) -> Any:
        """Return a pool with the methods of psycopg's; it connects with ``arguments``."""


class _Substituted:
    """The substitute of this process, if there is one, and all engines that it is for."""

    def __init__(self) -> None:
        self.by: Substitute | None = None
        self.engines: WeakSet[NodeEngines] = WeakSet()


_substituted: Final = _Substituted()


def substitute_all(by: Substitute | None) -> None:
    """Let a substitute give the connections to nodes, of engines that are made and those to come."""
    _substituted.by = by
    if by is not None:
        for engine in [engine for engines in list(_substituted.engines) for engine in engines.made()]:
            by.take(engine)


def substitute() -> Substitute | None:
    """Return the substitute of :func:`substitute_all`."""
    return _substituted.by


class NodeEngines:
    """Engines made when they are first asked for, in any thread; nodes are logged in to as ``login`` says.

    ``schema_of`` returns the name of a shard's schema. ``breakers`` refuse attempts to connect to nodes that
    are down. ``on_made`` is called with each new engine.
    """

    def __init__(
        self,
        login: URL,
        options: dict[str, Any],
        *,
        schema_of: Callable[[int], str],
        breakers: Breakers,
        on_made: Callable[[Node, Engine], object] | None = None,
    ) -> None:
        self._login = login
        self._breakers = breakers
        self._on_made = on_made
        self._options = options
        self._schema_of = schema_of
        self._of_nodes: dict[Node, Engine] = {}
        self._of_shards: dict[int, tuple[Node, Engine]] = {}
        _substituted.engines.add(self)
        self._new_lock()
        in_child(self, NodeEngines._new_lock)

    def of(self, node: Node) -> Engine:
        """Return the engine, with its pool, of a node."""
        known = self._of_nodes.get(node)
        if known is not None:
            return known
        with self._lock:
            if node not in self._of_nodes:
                url = with_login_of(parse_url(node.url), self._login)
                breaker = self._breakers.of(node)
                options = {"connect_timeout_s": CONNECT_TIMEOUT_S} | self._options
                engine = open_engine(url, what=f'node "{node.name}"', guard=breaker.connecting, **options)
                breaker.renew(engine)
                heed_stand_ins(engine)
                mark_writes(engine)
                dialect: Any = engine.dialect
                dialect.inspector = ShardInspector
                if self._on_made is not None:
                    self._on_made(node, engine)
                self._of_nodes[node] = engine
                if _substituted.by is not None:
                    _substituted.by.take(engine)
            return self._of_nodes[node]

    def of_shard(self, shard: int, node: Node) -> Engine:
        """Return the node's engine as seen from a shard: models without a schema are in the shard's."""
        known = self._of_shards.get(shard)
        if known is not None and known[0] is node:
            return known[1]
        engine = self.of(node).execution_options(schema_translate_map={None: self._schema_of(shard)})
        self._of_shards[shard] = (node, engine)
        return engine

    def prepare_for_move(self, shard: int, source: Node, target: Node) -> None:
        """Open connections to ``target`` until the pool has as many as that of ``source``, or is full.

        So the first transactions there wait neither for theirs nor for the server to read the generator's
        functions, which takes longer than all else that they do. Failures are left to those transactions.
        """
        known = self._of_nodes.get(source)
        if known is None:
            return
        engine = self.of(target)
        there, here = known.pool, engine.pool
        if not (isinstance(there, QueuePool) and isinstance(here, QueuePool)):
            return
        wanted = min(_opened(there), here.size() or _opened(there))
        # Refused, as the shard is not active there; the server's log need not tell that.
        draw = (
            f"do $$ begin perform {quoted(self._schema_of(shard))}.next_id();"
            " exception when others then null; end $$"
        )
        with suppress(ShardidsError, SQLAlchemyError), ExitStack() as kept:
            # A pool opens a connection only while all that it has are in use.
            while (before := _opened(here)) < wanted:
                connection = kept.enter_context(engine.connect())
                if _opened(here) > before:
                    # Past SQLAlchemy: no session runs it.
                    with suppress(psycopg.Error), closing(connection.connection.cursor()) as cursor:
                        cursor.execute(draw)
                        # The activation waits for whoever has the shard's sequence open.
                        connection.connection.rollback()

    def for_copying(self) -> NodeEngines:
        """Return engines of psycopg's blocking mode, with the same logins and ``connect_args``.

        They serve one copy, with one connection per node.
        """
        arguments = dict(self._options.get("connect_args", {}))
        options = {"connect_args": arguments, "pool_size": 1}
        return NodeEngines(self._login, options, schema_of=self._schema_of, breakers=self._breakers)

    def for_claims(self) -> NodeEngines:
        """Return engines of psycopg's blocking mode, with the same logins, in autocommit mode.

        Their connections are others than the sessions', so that nobody waits for one while holding one; and
        given up when the server falls silent, so that nobody holds written rows for as long as it does.
        """
        kept = ("connect_args", "max_overflow", "pool_pre_ping", "pool_recycle", "pool_size", "pool_timeout")
        options = {name: self._options[name] for name in kept if name in self._options}
        options["connect_args"] = dict(options.get("connect_args", {}))
        return NodeEngines(
            self._login,
            options | {"isolation_level": "AUTOCOMMIT", "is_watched": True},
            schema_of=self._schema_of,
            breakers=self._breakers,
            on_made=self._on_made,
        )

    def made(self) -> list[Engine]:
        """Return the engines of nodes that have been asked for."""
        with self._lock:
            return list(self._of_nodes.values())

    def dispose(self) -> None:
        """Close all connections."""
        with self._lock:
            for engine in self._of_nodes.values():
                engine.dispose()
            self._of_nodes.clear()
            self._of_shards.clear()

    def _new_lock(self) -> None:
        # Also in the child of a fork, where a thread that does not exist there may hold the old one.
        self._lock = Lock()


def _opened(pool: QueuePool) -> int:
    return pool.checkedin() + pool.checkedout()


class ShardInspector(PGInspector):
    """An inspector whose schema is the shard's, on an engine or a connection as seen from one shard."""

    @property
    def default_schema_name(self) -> str | None:
        """The shard's schema; that of the database where the bind is not a shard's."""
        translated = self.bind.get_execution_options().get("schema_translate_map", {})
        name: str | None = translated.get(None)
        return super().default_schema_name if name is None else name


def _of_the_shard(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(method)

    @wraps(method)
    def inspected(self: ShardInspector, *arguments: Any, **options: Any) -> Any:
        given = parameters.bind(self, *arguments, **options)
        here = self.bind.get_execution_options().get("schema_translate_map", {}).get(None)
        asked = given.arguments.get("schema")
        if here is None or asked not in (None, here):
            return method(self, *arguments, **options)
        given.arguments["schema"] = here
        found = method(*given.args, **given.kwargs)
        if method.__name__ == "get_foreign_keys":
            return [_without_schema(key, here) for key in found]
        if "_multi_" not in method.__name__:
            return found
        # Those are keyed by the schema that was asked for, and the table.
        tables = {(asked, table): value for (_, table), value in found.items()}
        if method.__name__ == "get_multi_foreign_keys":
            tables = {table: [_without_schema(key, here) for key in keys] for table, keys in tables.items()}
        return tables

    return inspected


def _without_schema(key: Any, here: str) -> Any:
    return {**key, "referred_schema": None} if key["referred_schema"] == here else key


for _name, _method in getmembers(PGInspector, isfunction):
    if "schema" in signature(_method).parameters and not _name.startswith("_"):
        setattr(ShardInspector, _name, _of_the_shard(_method))
