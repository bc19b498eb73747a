"""A session's connections: one per node, whatever its shards there, and one transaction that fails as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
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
_KEEPING: Final = ("repeatable read", "serializable")
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
        placement: the placement.
        shards: their numbers, sorted.
        by_node: the nodes, each with the schemas of its shards.
    """

    placement: Placement
    shards: Sequence[int]
    by_node: Sequence[tuple[Node, tuple[str, ...]]]


_EVERYWHERE: Final[WeakKeyDictionary[Any, Everywhere]] = WeakKeyDictionary()


def everywhere(cluster: Shards, placement: Placement) -> Everywhere:
    """Return all shards of a cluster by its placement; kept until that changes.

    Raises:
        ShardLost: one lives nowhere.
    """
    known = _EVERYWHERE.get(cluster)
    if known is None or known.placement is not placement:
        shards = placement.all_shards()
        schemas = [
            (placement.nodes[name], tuple(map(cluster.schema_of, there)))
            for name, there in placement.by_node(shards).items()
        ]
        _EVERYWHERE[cluster] = known = Everywhere(placement, shards, schemas)
    return known


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
    _began_by: Placement | None = None
    """The placement before the transaction's first statement, or later if it kept no snapshot until then."""
    _isolations: Mapping[object, str] = MappingProxyType({})
    """The isolation levels of the transactions on the nodes, as far as they were asked for."""
    _levels: dict[SessionTransaction, list[Connection]]
    """The connections that the transaction uses, and each of its savepoints."""
    _lent: list[tuple[dict[object, Any], object]]
    """The binds that stand for connections meanwhile, and where they are entered."""

    def settled(self, shards: Collection[int] | None = None) -> Placement:
        """Return the placement if statements over these shards, by default all, see each row once by it.

        A statement that is sent to shards one after another calls :meth:`Placement.require_settled` before
        each, with this placement as ``since``.

        Raises:
            RowsUnsettled: the rows of a key are just being moved from or to one of them; or they were, and
                the transaction keeps snapshots from before.
            ShardMoved: one of them has moved, and the transaction keeps snapshots from before.
        """
        placement = self.shards.placement
        if placement.unsettled:
            # The end of the move may not have been heard of yet.
            self.shards.refresh()
            placement = self.shards.placement
            placement.require_settled(shards)
        self._require_kept(placement, shards)
        return placement

    def _require_kept(self, placement: Placement, shards: Collection[int] | None) -> None:
        """Require that the snapshots which the transaction keeps have the rows that the placement leads to.

        Nothing is sent unless rows have moved since the transaction began.
        """
        began = self._began_by
        if began is None or began is placement:
            return
        if placement.has_rows_as(began) or not self.keeps_snapshots():
            self._began_by = placement
        else:
            placement.require_kept(began, shards)

    def keeps_snapshots(self) -> bool:
        """Return whether the transaction sees rows of a node as they were at its first statement there.

        It asks once per node. A node that was sent nothing yet has no snapshot.
        """
        isolations: dict[object, str] = {}
        for connection in self.begun:
            if _has_failed(connection):
                continue
            driver: Any = connection.connection.driver_connection
            if driver.info.transaction_status == TransactionStatus.INTRANS:
                # It is the same to the end of the transaction: this is a query of it.
                transaction = connection.get_transaction()
                isolations[transaction] = self._isolations.get(transaction) or str(
                    connection.exec_driver_sql("select current_setting('transaction_isolation')").scalar()
                )
        self._isolations = isolations
        return any(isolation in _KEEPING for isolation in isolations.values())

    def engine_of(self, shard: int) -> Engine:
        """Return the engine of the node that holds a shard, which all shards of the node share.

        Raises:
            ShardMoved, RowsUnsettled: the transaction keeps snapshots that lack the shard's rows, or some.
        """
        node, placement = self.shards.node_of(shard), self.shards.placement
        if placement is not self._began_by:
            self._require_kept(placement, (shard,))
        return self._engine(node)

    def _engine(self, node: Node) -> Engine:
        self._wanted = node.name
        engine = self.shards.engine(node)
        return self.shards.decisions.engine(engine, node) if self.twophase else engine

    def node_connection(self, shard: int) -> Connection:
        """Return the session's connection to the node that holds a shard, in its transaction."""
        return self._connection(self.engine_of(shard))

    def connection_of(self, node: Node) -> Connection:
        """Return the session's connection to a node, in its transaction."""
        return self._connection(self._engine(node))

    def _connection(self, engine: Engine) -> Connection:
        try:
            return super().connection(bind_arguments={"bind": engine})
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
            if not self.begun:
                self._began_by = self.shards.placement
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
            self.begun, self._began_by = [], None
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
