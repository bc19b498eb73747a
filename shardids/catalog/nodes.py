"""Connections to the nodes of a cluster, and one way to ask all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Generic, Self, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from shardids.catalog.rows import unknown_node
from shardids.catalog.topology import Node
from shardids.errors import ShardidsError
from shardids.pg.connections import CONNECT_TIMEOUT_S, keep_commits, keep_settings, open_engine, reading
from shardids.pg.urls import parse_url, with_password_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Generic[T]):
    """The answers of the nodes: each node's name is in just one of the two.

    Attributes:
        results: what ``ask`` returned.
        failures: the error that ``ask`` raised.
    """

    results: Mapping[str, T]
    failures: Mapping[str, ShardidsError]

    def all(self) -> Mapping[str, T]:
        """Return the results, when every node has one.

        Raises:
            ShardidsError: the failure of the first node, by name, that failed.
        """
        for name in sorted(self.failures):
            raise self.failures[name]
        return self.results


class Nodes(Mapping[str, Engine]):
    """Engines for administrative statements on the nodes of a cluster, by node name.

    An engine is created when it is first asked for; closing, or the end of a ``with`` block, disposes of all.
    A server that can't be reached within ``connect_timeout_s``, or that falls silent (see
    :mod:`shardids.pg.connections`), raises :class:`~shardids.errors.ConnectionFailed`, which names the
    node.

    Args:
        nodes: the nodes, as the catalog or a placement has them.
        login: URL whose password nodes without one use when the user is the same: the catalog's.
        application_name: name of the sessions in ``pg_stat_activity``.
        connections: how many connections to a node may be open at once.
        connect_timeout_s: how long each address of a server is tried, in seconds.
        settings: settings of each session, by name.
        durable: whether every COMMIT waits for the disk, whatever the server's ``synchronous_commit``.
        autocommit: whether every statement is its own transaction.
        read_only: whether transactions are read-only.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        login: URL,
        *,
        application_name: str = "shardids",
        connections: int = 1,
        connect_timeout_s: int = CONNECT_TIMEOUT_S,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        autocommit: bool = False,
        read_only: bool = False,
    ) -> None:
        self._nodes = nodes
        self._login = login
        self._application_name = application_name
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._durable = durable
        self._settings = dict(settings or {})
        if read_only and autocommit:
            # Such transactions are begun by the server.
            self._settings["default_transaction_read_only"] = "on"
        self._read_only = read_only
        self._autocommit = autocommit
        self._engines: dict[str, Engine] = {}
        self._lock = Lock()

    def __getitem__(self, name: str) -> Engine:
        """Return the engine of a node.

        Raises:
            ClusterConflict: the node does not exist.
        """
        if name not in self._nodes:
            raise unknown_node(name, self._nodes)
        with self._lock:
            if name not in self._engines:
                self._engines[name] = self._open(self._nodes[name])
            return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.dispose()

    def each(self, ask: Callable[[str, Engine], T], names: Iterable[str] | None = None) -> Answers[T]:
        """Call ``ask(name, engine)`` for the nodes, all at once, a thread a node; default: every node.

        A :class:`~shardids.errors.ShardidsError` is the node's answer; any other exception is raised here,
        when all nodes have answered.
        """
        wanted = list(self._nodes if names is None else names)
        results: dict[str, T] = {}
        failures: dict[str, ShardidsError] = {}
        with ThreadPoolExecutor(max(1, len(wanted)), thread_name_prefix="shardids") as pool:
            asked = {name: pool.submit(ask, name, self[name]) for name in wanted}
        for name, answer in asked.items():
            try:
                results[name] = answer.result()
            except ShardidsError as error:
                failures[name] = error
        return Answers(results=results, failures=failures)

    def _open(self, node: Node) -> Engine:
        engine = administrative_engine(
            with_password_of(parse_url(node.url), self._login),
            what=f'node "{node.name}"',
            application_name=self._application_name,
            connections=self._connections,
            connect_timeout_s=self._connect_timeout_s,
        )
        if self._durable:
            keep_commits(engine)
        if self._settings:
            keep_settings(engine, self._settings)
        if self._autocommit:
            return engine.execution_options(isolation_level="AUTOCOMMIT")
        return reading(engine, only=self._read_only)


def administrative_engine(
    url: URL,
    *,
    what: str,
    application_name: str = "shardids",
    connections: int = 1,
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
) -> Engine:
    """An engine as :class:`Nodes` opens them, to any database; errors call it ``what``."""
    return open_engine(
        url,
        what=what,
        administrative=True,
        connect_timeout_s=connect_timeout_s,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"application_name": application_name},
    )
