"""One shard: its sessions, transactions and connections, and the four ways to name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.orm import Query, Session

from shardids.catalog.topology import Node
from shardids.client import blocks
from shardids.client.blocks import IdBlock
from shardids.client.old_ids import WithinShard
from shardids.client.placement import PATIENCE_S, Attempts
from shardids.client.routing.models import Key
from shardids.client.routing.one_shard import After
from shardids.client.routing.sessions import session_class
from shardids.errors import BadArgument

if TYPE_CHECKING:
    from shardids.client.cluster import Cluster

T = TypeVar("T")
Theirs = TypeVar("Theirs", bound=Session)


class ByKey(TypedDict, total=False):
    """The shard of a sharding key, as type checkers see it; see :meth:`shardids.Cluster.at`."""

    key: Required[Key]
    region: str | None
    after: After | None


class ById(TypedDict, total=False):
    """The shard where an ID was born, or where the row with an old ID is."""

    id: Required[int | UUID]
    of: Any
    after: After | None


class ByLookup(TypedDict, total=False):
    """The shard of the row with a look-up key."""

    lookup: Required[ColumnElement[bool]]
    after: After | None


class ByNumber(TypedDict, total=False):
    """The shard with a number."""

    shard: Required[int]
    after: After | None


class SessionOptions(TypedDict, total=False):
    """The keywords of :class:`sqlalchemy.orm.Session`, except ``bind`` and ``binds``: the cluster binds."""

    autobegin: bool
    autocommit: Literal[False]
    autoflush: bool
    close_resets_only: bool
    enable_baked_queries: bool
    execution_options: Mapping[str, Any]
    expire_on_commit: bool
    future: Literal[True]
    info: dict[Any, Any]
    join_transaction_mode: Literal[
        "conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"
    ]
    query_cls: type[Query[Any]]
    twophase: bool


class Shard:
    """One shard of a cluster, wherever it is now: :meth:`shardids.Cluster.at` finds it.

    Attributes:
        number: its number.
        after: the ID that those of its sessions, transactions and blocks sort after; ``None`` for any.
    """

    __slots__ = ("_cluster", "_locate", "_located_at", "after", "number")

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        after: int | None,
        locate: Callable[[], int] | None = None,
        located_at: int = 0,
    ) -> None:
        self._cluster = cluster
        self.number = number
        self.after = after
        self._locate, self._located_at = locate, located_at

    def __repr__(self) -> str:
        return f"Shard(number={self.number}, after={self.after})"

    @property
    def node(self) -> Node:
        """The node that holds the shard now.

        Raises:
            UnknownShard: no node holds it yet.
        """
        return self._cluster.node_of(self.number)

    @property
    def engine(self) -> Engine:
        """The engine of the shard's node as seen from the shard, with the node's pool.

        Models without a schema are in the shard's, through ``schema_translate_map``.

        Raises:
            BadArgument: the shard was found with ``after``, which connections do not keep.
            UnknownShard: no node holds it yet.
        """
        if self.after is not None:
            raise BadArgument(
                "after= applies to session(), run() and reserve(), not to an engine or its connections",
                hint=f"Leave it out, or raise the shard first: cluster.at(shard={self.number},"
                f" after={self.after}).reserve(1)",
            )
        return self._cluster._engines.of_shard(self.number, self.node)

    def connection(self) -> Connection:
        """Return a Core connection on the shard; raise as :attr:`engine` does."""
        return self.engine.connect()

    def reserve(self, count: int) -> IdBlock:
        """Set ``count`` IDs aside in one call; see :class:`shardids.IdBlock`.

        Raises:
            BadArgument: a count below 1 or above the node's ``max_reserve``.
            ShardFenced, ShardMoved, TooFarAhead, TimeExhausted: see the classes.
        """
        with self._cluster.engine(self.node).begin() as connection:
            return blocks.reserve(connection, self.number, count, self._cluster.layout, after=self.after)

    @overload
    def session(self, **options: Unpack[SessionOptions]) -> Session: ...
    @overload
    def session(self, *, class_: type[Theirs], **options: Any) -> Theirs: ...

    def session(self, **options: Any) -> Session:
        """Return a plain SQLAlchemy session on the shard.

        Models without a schema live in the shard's schema, through ``schema_translate_map``. ``options`` go
        to :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it. Nothing is
        connected before the first statement. An object of another shard is refused before anything is
        written.

        Raises:
            BadArgument: by the first statement, if the shard would have to be raised past ``after`` in a
                read-only transaction.
            TooFarAhead: by the first statement, if ``after`` leads the node's clock by over ``max_past``.
            UnknownShard: no node holds the shard.
        """
        return self._session(self._cluster.placement.locate(self.number), options)

    @overload
    def run(
        self, fn: Callable[[Session], T], *, patience_s: float = ..., **options: Unpack[SessionOptions]
    ) -> T: ...
    @overload
    def run(
        self, fn: Callable[[Theirs], T], *, class_: type[Theirs], patience_s: float = ..., **options: Any
    ) -> T: ...

    def run(self, fn: Callable[[Any], T], *, patience_s: float = PATIENCE_S, **options: Any) -> T:
        """Call ``fn(session)`` in one transaction on the shard, commit, and return the result of ``fn``.

        When the shard is fenced, has moved or is gone, or the connection to its node is lost, this reads the
        placement again and repeats the whole transaction on the shard's new owner; when the key, the ID or
        the look-up key that it was found by is in another shard by now, there. If the old node reports a
        move that the catalog does not show yet, it waits up to ``patience_s`` seconds (5) in all, and now
        and then tries the old node, since a move can be aborted. ``fn`` may therefore run several times: it
        should have no effects outside ``session``, and leave COMMIT to this method.

        A connection lost during COMMIT is not retried: the transaction may have been committed.

        ``options`` are those of :meth:`session`. Objects keep their loaded attributes after the commit
        (``expire_on_commit=False``), so that ``fn`` can return them.

        Raises:
            BadArgument, TooFarAhead, UnknownShard: see :meth:`session`.
            ConnectionFailed: the node cannot be reached, and the shard is still on it.
            ShardMoved: the catalog still shows the old node after ``patience_s``.
            KeyMoved: likewise the key's old shard; or the shard was named by its number.
            ShardFenced: the shard is fenced and is not being moved.
            CommitUncertain: the connection was lost during COMMIT.
        """
        kept = {"expire_on_commit": False} | options

        def transaction(node: Node) -> T:
            with self._at(attempts.shard)._session(node, dict(kept)) as session, session.begin():
                return fn(session)

        attempts = self._attempts(patience_s)
        with self._cluster._kinds.running(self.number, attempts):
            return attempts.repeat(transaction)

    def _at(self, number: int) -> Shard:
        """Return the shard that a transaction is for: another one has taken the key over, or not."""
        return self if number == self.number else Shard(self._cluster, number, self.after)

    def _attempts(self, patience_s: float) -> Attempts:
        return Attempts(self._cluster._followed, self.number, patience_s, self._locate, self._located_at)

    def _session(self, node: Node, options: dict[str, Any]) -> Session:
        cluster = self._cluster
        made: Any = session_class(cluster._kinds.shard, options.pop("class_", None))
        session: Session = made(cluster._engines.of_shard(self.number, node), **self._facts(), **options)
        return session

    def _facts(self) -> dict[str, Any]:
        """Return the keywords of a session on the shard, beside its engine and the caller's options."""
        cluster = self._cluster
        finder: Any = cluster
        if cluster._followed.old_ids is not None:
            finder = WithinShard(cluster, cluster._old_ids, self.number)
        return {
            "finder": finder,
            "claims": cluster.claims,
            "shard": self.number,
            "after": self.after,
            **cluster._kinds.options,
        }
