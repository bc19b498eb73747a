"""A session's connections: one a node, whatever its shards there, and one transaction that fails as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, Protocol, TypeVar

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, Executable, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, SessionTransaction

from shardids.catalog.topology import Node, Placement
from shardids.client.routing.models import Claimant, ShardFinder
from shardids.client.routing.twophase import Decisions, Part, Whole
from shardids.errors import ConnectionFailed, ShardidsError

T = TypeVar("T")

FanOut = Literal["all", "named", "never"]
"""Which statements may concern several shards: all, those whose criteria name the shards, or none."""

_FAIL: Final = """
    do $$begin
      raise exception 'a statement of this transaction has failed on another node';
    end$$"""
_FAILED: Final = (TransactionStatus.INERROR, TransactionStatus.UNKNOWN)


class Shards(ShardFinder, Protocol):
    """What a session over all shards asks the cluster."""

    @property
    def decisions(self) -> Decisions:
        """What sessions share that commit on several nodes."""

    @property
    def claims(self) -> Claimant:
        """Who claims the values of look-up keys."""

    @property
    def placement(self) -> Placement:
        """Which node holds which shard."""

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard now."""

    def engine(self, node: Node) -> Engine:
        """Returns the engine of a node."""

    def schema_of(self, shard: int) -> str:
        """Returns the schema of a shard."""

    def query_node(self) -> Node | None:
        """Returns the query node, if there is one."""

    def refresh(self) -> bool:
        """Reads the placement and the query node's address again."""


class ShardConnection:
    """A node's connection as the flush of one shard's objects sees it.

    What it executes has the shard's ``schema_translate_map``; all else is the node's connection's own.
    SQLAlchemy puts rows whose connections are equal into one INSERT, so two of these are equal only if their
    shards are.
    """

    __slots__ = ("_node", "_within")

    def __init__(self, node: Connection, within: Mapping[str, Any]) -> None:
        self._node = node
        self._within = within

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardConnection) and self._node is other._node and self._within == other._within
        )

    def __hash__(self) -> int:
        return hash(self._node)

    def execute(
        self,
        statement: Executable,
        parameters: Any = None,
        *,
        execution_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """As :meth:`sqlalchemy.Connection.execute`, in the shard."""
        options = {**(execution_options or {}), **self._within}
        return self._node.execute(statement, parameters, execution_options=options)

    def scalar(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalar`, in the shard."""
        return self.execute(statement, parameters, **options).scalar()

    def scalars(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalars`, in the shard."""
        return self.execute(statement, parameters, **options).scalars()


class NodeSession(Session):
    """A session of one connection a node, whose transaction, or savepoint, fails on all of them or on none.

    A node whose part has failed refuses each statement until ROLLBACK, or ROLLBACK TO SAVEPOINT. The session
    makes the other parts fail before it sends or commits anything else.

    Attributes:
        shards: the cluster.
        fan_out: which statements may concern several shards.
    """

    shards: Shards
    fan_out: FanOut
    _writing: int | None = None
    _inserting: int | None = None
    _wanted = ""
    _whole: tuple[object, Whole] | None = None
    _levels: dict[SessionTransaction, list[Connection]]
    """The connections that the transaction uses, and each of its savepoints."""

    @property
    def begun(self) -> list[Connection]:
        """The connections that the session's transaction uses."""
        root = self.get_transaction()
        return [] if root is None else self._levels.get(root, [])

    def engine_of(self, shard: int) -> Engine:
        """Returns the engine of the node that holds a shard, which all shards of the node share."""
        node = self.shards.node_of(shard)
        self._wanted = node.name
        engine = self.shards.engine(node)
        return self.shards.decisions.engine(engine, node) if self.twophase else engine

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""
        try:
            return super().connection(bind_arguments={"bind": self.engine_of(shard)})
        except PoolTimeout as error:
            raise self.without_connection() from error

    connection_to = node_connection

    def within(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""
        return {"schema_translate_map": {None: self.shards.schema_of(shard)}}

    def shard_connection(self, shard: int) -> Any:
        """Returns the session's connection to a node as seen from a shard."""
        return ShardConnection(self.node_connection(shard), self.within(shard))

    def without_connection(self) -> ConnectionFailed:
        """Returns the error of a pool that gives no connection."""
        return ConnectionFailed(
            f'no connection of the pool to node "{self._wanted}" became free; this session holds those to'
            f" {len(self.begun)} nodes meanwhile",
            hint="A session over all shards holds a connection per node to the end of its transaction, so"
            " sessions can wait for each other: give Cluster.connect() a pool_size of at least the number"
            " of sessions at a time, or end sessions sooner.",
        )

    @contextmanager
    def writing_to(self, shard: int) -> Iterator[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""
        self._writing = shard
        try:
            yield
        finally:
            self._writing = None

    @contextmanager
    def inserting(self, shard: int) -> Iterator[None]:
        """While rows are inserted into one shard, not objects into any."""
        self._inserting = shard
        try:
            yield
        finally:
            self._inserting = None

    def in_each(self, shards: Iterable[int], do: Callable[[int], T]) -> list[T]:
        """Returns ``do(shard)`` of each shard; an error after the first fails the transaction."""
        results: list[T] = []
        try:
            for shard in shards:
                results.append(do(shard))
        except BaseException:
            if results:
                self._fail()
            raise
        return results

    def fail_together(self) -> None:
        """Makes the transaction fail on all nodes if it has failed on one."""
        begun = self.begun
        if len(begun) > 1 and any(map(_has_failed, begun)):
            self._fail()

    def _fail(self) -> None:
        level = self.get_nested_transaction() or self.get_transaction()
        # What a savepoint has not touched must survive its end: it has none on those connections.
        for connection in self._levels.get(level, ()):  # type: ignore[arg-type]  # None is not among them
            if not _has_failed(connection):
                with suppress(DBAPIError, ShardidsError):
                    connection.exec_driver_sql(_FAIL)

    def note_begun(self, transaction: SessionTransaction, connection: Connection) -> None:
        """Notes a connection of the transaction; with ``twophase`` it makes it one part of the whole."""
        level = self._levels.setdefault(transaction, [])
        if connection not in level:
            level.append(connection)
        self.fail_together()
        part, root = connection.get_transaction(), self.get_transaction()
        if isinstance(part, Part) and part.whole is None:
            if self._whole is None or self._whole[0] is not root:
                self._whole = (root, Whole(self.shards.decisions))
            self._whole[1].add(part)
            self.shards.decisions.require_fit(part.node, connection)

    def note_ended(self, transaction: SessionTransaction) -> None:
        """Forgets a transaction or savepoint."""
        self._levels.pop(transaction, None)


def _has_failed(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    # libpq knows it: nothing is sent.
    driver: Any = connection.connection.driver_connection
    return driver.info.transaction_status in _FAILED


@event.listens_for(NodeSession, "before_flush", propagate=True)
@event.listens_for(NodeSession, "before_commit", propagate=True)
def _before(session: Any, *_: object) -> None:
    session.fail_together()


@event.listens_for(NodeSession, "after_begin", propagate=True)
def _after_begin(session: Any, transaction: SessionTransaction, connection: Connection) -> None:
    session.note_begun(transaction, connection)


@event.listens_for(NodeSession, "after_transaction_end", propagate=True)
def _after_end(session: Any, transaction: SessionTransaction) -> None:
    session.note_ended(transaction)
