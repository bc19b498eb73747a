"""A session's connections: one per node, whatever its shards there, and one transaction that fails as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, Executable, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, SessionTransaction

from shardids.catalog.topology import Node, Placement
from shardids.client.routing.models import Claimant, ShardFinder
from shardids.client.routing.twophase import Decisions, Part, Whole
from shardids.errors import ConnectionFailed, ShardidsError

T = TypeVar("T")

FanOut = Literal["all", "named", "never"]
"""Which statements may concern several shards: all, those whose criteria name the shards, or none."""

SHARD: Final = "shardids_shard"
"""The execution option that names the shard of a statement and of its loaders'."""

_FAIL: Final = """
    do $$begin
      raise exception 'a statement of this transaction has failed on another node';
    end$$"""
_HAS_READ_ONLY: Final = "select pg_catalog.pg_current_xact_id_if_assigned() is null"
_FAILED: Final = (TransactionStatus.INERROR, TransactionStatus.UNKNOWN)


class Shards(ShardFinder, Protocol):
    """The parts of a cluster that a session over all shards uses."""

    @property
    def decisions(self) -> Decisions:
        """What sessions share that commit on several nodes."""

    @property
    def claims(self) -> Claimant:
        """The claims on the values of look-up keys."""

    @property
    def placement(self) -> Placement:
        """Which node holds which shard."""

    def node_of(self, shard: int) -> Node:
        """Return the node that holds a shard now."""

    def engine(self, node: Node) -> Engine:
        """Return the engine of a node."""

    def schema_of(self, shard: int) -> str:
        """Return the schema of a shard."""

    def query_node(self) -> Node | None:
        """Return the query node, if there is one."""

    def refresh(self) -> bool:
        """Read the placement and the query node's address again."""


class Everywhere(NamedTuple):
    """All shards of a placement.

    Attributes:
        shards: their numbers, sorted.
        by_node: per node its first shard, and the schemas of all its shards.
    """

    shards: Sequence[int]
    by_node: Sequence[tuple[int, tuple[str, ...]]]


_EVERYWHERE: Final[WeakKeyDictionary[Any, tuple[Placement, Everywhere]]] = WeakKeyDictionary()


def settled(cluster: Shards, shards: Collection[int] | None) -> Placement:
    """Return the placement if statements over these shards, by default all, see each row once by it.

    Raises:
        RowsUnsettled: the rows of a key are just being moved from or to one of them.
    """
    placement = cluster.placement
    if placement.unsettled:
        # The end of the move may not have been heard of yet.
        cluster.refresh()
        placement = cluster.placement
        placement.require_settled(shards)
    return placement


def everywhere(cluster: Shards) -> Everywhere:
    """Return all shards of a cluster; kept until its placement changes.

    Raises:
        ShardLost: one lives nowhere.
        RowsUnsettled: a key's rows are just being moved between two shards.
    """
    placement, known = settled(cluster, None), _EVERYWHERE.get(cluster)
    if known is None or known[0] is not placement:
        shards = placement.all_shards()
        schemas = [
            (there[0], tuple(map(cluster.schema_of, there))) for there in placement.by_node(shards).values()
        ]
        _EVERYWHERE[cluster] = known = placement, Everywhere(shards, schemas)
    return known[1]


class ShardConnection:
    """A node's connection as the flush of one shard's objects sees it.

    Its statements have the shard's ``schema_translate_map``; everything else is the node connection's own.
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
        """Act as :meth:`sqlalchemy.Connection.execute`, in the shard."""
        options = {**(execution_options or {}), **self._within}
        return self._node.execute(statement, parameters, execution_options=options)

    def scalar(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """Act as :meth:`sqlalchemy.Connection.scalar`, in the shard."""
        return self.execute(statement, parameters, **options).scalar()

    def scalars(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """Act as :meth:`sqlalchemy.Connection.scalars`, in the shard."""
        return self.execute(statement, parameters, **options).scalars()


class NodeSession(Session):
    """A session of one connection per node, whose transaction, or savepoint, fails on all of them or on none.

    A node whose part has failed refuses each statement until ROLLBACK, or ROLLBACK TO SAVEPOINT. The session
    makes the other parts fail before it sends or commits anything else.

    Attributes:
        shards: the cluster.
        fan_out: which statements may concern several shards.
        innermost: the innermost part of the transaction; a flush is one.
        begun: the connections that the transaction uses.
        only_merges: whether the transaction has only merged rows of several shards.
    """

    shards: Shards
    fan_out: FanOut
    innermost: SessionTransaction | None = None
    begun: list[Connection]
    only_merges = True
    _writing: int | None = None
    _inserting: int | None = None
    _wanted = ""
    _whole: tuple[object, Whole] | None = None
    _levels: dict[SessionTransaction, list[Connection]]
    """The connections that the transaction uses, and each of its savepoints."""
    _lent: list[tuple[dict[object, Any], object]]
    """The binds that stand for connections meanwhile, and where they are entered."""

    def engine_of(self, shard: int) -> Engine:
        """Return the engine of the node that holds a shard, which all shards of the node share."""
        node = self.shards.node_of(shard)
        self._wanted = node.name
        engine = self.shards.engine(node)
        return self.shards.decisions.engine(engine, node) if self.twophase else engine

    def node_connection(self, shard: int) -> Connection:
        """Return the session's connection to the node that holds a shard, in its transaction."""
        try:
            return super().connection(bind_arguments={"bind": self.engine_of(shard)})
        except PoolTimeout as error:
            raise self.without_connection() from error

    connection_to = node_connection

    def within(self, shard: int) -> dict[str, Any]:
        """Return the execution options that send a statement into a shard."""
        return {"schema_translate_map": {None: self.shards.schema_of(shard)}}

    def shard_connection(self, shard: int) -> Any:
        """Return the session's connection to a node as seen from a shard."""
        return ShardConnection(self.node_connection(shard), self.within(shard))

    def without_connection(self) -> ConnectionFailed:
        """Return the error of a pool that gives no connection."""
        return ConnectionFailed(
            f'timed out waiting for a pooled connection to node "{self._wanted}"; this session holds'
            f" connections to {len(self.begun)} other nodes",
            hint="A session over all shards holds a connection per node until its transaction ends, so"
            " sessions can wait for each other: give Cluster.connect() a pool_size of at least the number"
            " of concurrent sessions, or end sessions sooner.",
        )

    @contextmanager
    def writing_to(self, shard: int) -> Iterator[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""
        self._writing = shard
        try:
            yield
        finally:
            self._writing = None
            # They would be ended with the transaction, if it is not a part for this operation alone.
            for connections, bind in self._lent:
                connections.pop(bind, None)
            self._lent.clear()

    @contextmanager
    def inserting(self, shard: int) -> Iterator[None]:
        """While rows are inserted into one shard, not objects into any."""
        self._inserting = shard
        try:
            yield
        finally:
            self._inserting = None

    def in_each(self, shards: Iterable[int], do: Callable[[int], T]) -> list[T]:
        """Return ``do(shard)`` of each shard; an error after the first fails the transaction."""
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
        """Make the transaction fail on all nodes if it has failed on one."""
        if any(map(_has_failed, self.begun)):
            self._fail()

    def _fail(self) -> None:
        level = self.get_nested_transaction() or self.get_transaction()
        # What a savepoint has not touched must survive its end: it has none on those connections.
        for connection in self._levels.get(level, ()):  # type: ignore[arg-type]  # None is not among them
            if not _has_failed(connection):
                with suppress(DBAPIError, ShardidsError):
                    connection.exec_driver_sql(_FAIL)

    def note_begun(self, transaction: SessionTransaction, connection: Connection) -> None:
        """Note a connection of the transaction; with ``twophase`` it makes it one part of the whole."""
        level = self._levels.setdefault(transaction, [])
        if connection not in level:
            level.append(connection)
        if transaction.parent is None:
            self.begun = level
        self.fail_together()
        part, root = connection.get_transaction(), self.get_transaction()
        if isinstance(part, Part) and part.whole is None:
            if self._whole is None or self._whole[0] is not root:
                self._whole = (root, Whole(self.shards.decisions))
            self._whole[1].add(part)
            self.shards.decisions.require_fit(part.node, connection)

    def note_created(self, transaction: SessionTransaction) -> None:
        """Note the innermost part of the transaction."""
        self.innermost = transaction

    def note_ended(self, transaction: SessionTransaction) -> None:
        """Forget a transaction or savepoint."""
        self._levels.pop(transaction, None)
        self.innermost = transaction.parent
        if transaction.parent is None:
            self.begun = []
            self.only_merges = True


def end_reading(connection: Connection) -> None:
    """Commit the transaction of a connection, if it has written nothing; errors are left to its rollback.

    At a rollback psycopg forgets the statements that it has prepared.
    """
    # SQLAlchemy goes back to the savepoint later, which COMMIT would have ended.
    if connection.in_nested_transaction():
        return
    with suppress(SQLAlchemyError, ShardidsError, psycopg.Error):
        pooled: Any = connection.connection
        if pooled.driver_connection.prepare_threshold is not None and (
            connection.exec_driver_sql(_HAS_READ_ONLY).scalar()
        ):
            pooled.dbapi_connection.commit()


def _has_failed(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    # libpq knows it: nothing is sent.
    driver: Any = connection.connection.driver_connection
    return driver.info.transaction_status in _FAILED


event.listen(NodeSession, "before_flush", lambda session, *_: session.fail_together(), propagate=True)
event.listen(NodeSession, "before_commit", lambda session: session.fail_together(), propagate=True)
event.listen(NodeSession, "after_begin", NodeSession.note_begun, propagate=True)
event.listen(NodeSession, "after_transaction_create", NodeSession.note_created, propagate=True)
event.listen(NodeSession, "after_transaction_end", NodeSession.note_ended, propagate=True)
