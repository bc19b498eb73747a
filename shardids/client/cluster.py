"""Sessions, routing and IDs over all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import Node, schema_name
from shardids.client.engines import NodeEngines
from shardids.client.listener import FollowedPlacement
from shardids.client.lookups import Claims
from shardids.client.metering import SessionKinds
from shardids.client.old_ids import KnownOldIds
from shardids.client.options import SessionOptions
from shardids.client.references import WritesReferences
from shardids.client.retries import PATIENCE_S, Attempts
from shardids.client.routing import After, FanOut, Key, RoutedSession, session_class
from shardids.client.routing.twophase import Decisions
from shardids.errors import ShardidsError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

T = TypeVar("T")
Theirs = TypeVar("Theirs", bound=Session)


class Cluster(WritesReferences):
    """A sharded cluster as its catalog describes it; safe to share between threads.

    Open one with :meth:`connect`. It holds one engine, so one connection pool, per node, whatever the
    number of shards. It keeps routing by the placement it knows while the catalog is down.

    From the first use of the placement on, a thread listens to the catalog over its own connection, so that a
    change is known as soon as it is committed. After a fork the child makes its own connections.
    """

    def __init__(
        self,
        catalog: Catalog,
        description: Description,
        engine_options: dict[str, Any],
        *,
        listen: bool = True,
        meter: Meter | None = None,
    ) -> None:
        self._kinds = kinds = SessionKinds.of(meter)
        followed = FollowedPlacement(catalog, listen=listen, on_retry=kinds.on_retry)
        schema_of = partial(schema_name, description.schema_prefix)
        self._engines = NodeEngines(catalog.url, engine_options, schema_of=schema_of, on_made=kinds.on_engine)
        old_ids = KnownOldIds(
            catalog,
            followed,
            self._engines.for_copying(),
            shard_count=description.shard_count,
            schema_of=schema_of,
        )
        self._claiming = self._engines.for_claims()
        claims = Claims(
            followed,
            self._claiming.of,
            shard_count=description.shard_count,
            schema_of=schema_of,
            on_clash=kinds.on_clash,
        )
        super().__init__(description, followed, old_ids, claims, catalog=catalog, engines=self._engines)
        self.decisions = Decisions(description.cluster)
        self._query_node: QueryNode | None = None

    @classmethod
    def connect(
        cls,
        catalog_url: str | URL,
        *,
        listen: bool = True,
        meter: Meter | None = None,
        **engine_options: Any,
    ) -> Self:
        """Reads the catalog at ``catalog_url``.

        With ``listen=False`` only :meth:`refresh` and :meth:`run` notice a change of the placement: for short
        programs, and for catalogs behind PgBouncer in transaction mode, which drops notifications.

        ``meter`` is one of OpenTelemetry, by which sessions, retries, refusals, fan-outs and the time of
        statements are counted.

        ``engine_options`` (``pool_size``, ``echo``, ``connect_args`` …) go to
        :func:`sqlalchemy.create_engine` for each node. The nodes are logged in to as the
        user of ``catalog_url``, with its password or else that of ``PGPASSWORD`` or ``~/.pgpass``.

        Raises:
            ConnectionFailed: the catalog cannot be reached.
            ClusterConflict: the database holds no catalog.
        """
        catalog = Catalog(catalog_url)
        try:
            return cls(catalog, catalog.describe(), engine_options, listen=listen, meter=meter)
        except BaseException:
            catalog.close()
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._followed.close()
        self._catalog.close()
        self._engines.dispose()
        self._old_ids.close()
        self._claiming.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query_node(self) -> Node | None:
        """Returns the database whose views show the rows of all shards, if the cluster has one.

        Raises:
            ConnectionFailed: the catalog cannot be reached, and it was not asked before.
        """
        if self._query_node is None:
            self._query_node = query_node_of(self._catalog)
        return None if self._query_node is None else self._query_node.address(self.placement)

    def refresh(self) -> bool:
        """Reads the placement again; returns whether it could.

        If the catalog is down, the known placement stays in use and a warning is logged.
        """
        self._query_node = None
        return self._followed.try_refresh()

    @overload
    def session(
        self,
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,
        of: Any = None,
        shard: int | None = None,
        lookup: Any = None,
        after: After | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session: ...
    @overload
    def session(self, *, class_: type[Theirs], **options: Any) -> Theirs: ...

    def session(
        self,
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,  # noqa: A002 -- the field's word for it
        of: Any = None,
        shard: int | None = None,
        lookup: Any = None,
        after: After | None = None,
        **options: Any,
    ) -> Session:
        """Returns a plain SQLAlchemy session on one shard: of a key, of an ID's origin, or by number.

        ``lookup`` is a criterion on a look-up key, ``User.email == "…"``: the shard is that of the row.
        ``of`` says whose ID it is, for those that were issued before the cluster: see :meth:`shard_of`.
        ``region`` says that a key is among that region's shards: see :meth:`shard_for`.

        ``after`` is an ID, or several: what this session writes answers their rows, and the IDs of its rows
        sort after them, whatever the nodes' clocks show. Each transaction begins with a look at the shard,
        which is raised if it has to be; see ``docs/explanation/order.md``.

        Models without a schema live in the shard's schema, through ``schema_translate_map``. ``options`` go
        to :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it.
        Nothing is connected before the first statement. An object of another shard is refused before anything
        is written.

        Raises:
            BadArgument: not exactly one of ``key``, ``id``, ``shard`` and ``lookup``, or one out of range, or
                no such region; or ``after`` is no ID of this cluster, or an old one; by the first statement,
                if the shard would have to be raised in a read-only transaction.
            UnknownValue: no row has the value of a look-up key.
            UnknownId: an old ID that no row had.
            UnknownShard: no node holds the shard.
            TooFarAhead: by the first statement, if ``after`` leads the node's clock by over ``max_past``.
        """
        number = self._pick(key, id, shard, of, lookup=lookup, region=region)
        return self._session(number, self.node_of(number), self._latest(after), options)

    @overload
    def sharded_session(
        self, *, fan_out: FanOut = "all", **options: Unpack[SessionOptions]
    ) -> RoutedSession: ...
    @overload
    def sharded_session(
        self,
        *,
        class_: type[Theirs],
        fan_out: FanOut = "all",
        **options: Any,
    ) -> Theirs: ...

    def sharded_session(self, *, fan_out: FanOut = "all", **options: Any) -> Session:
        """Returns a SQLAlchemy session over all shards, with one connection and one transaction a node.

        Objects are written where their sharding key, their ID or their parents say. Statements go to the
        shards that their criteria name, as ``User.id == …`` and ``User.name.in_([…])`` do; those that name
        none go to all shards. The rows of several shards are merged; what PostgreSQL has to compute over
        them, the query node computes. It sees what is committed, so it is not asked about tables that the
        session has written to.

        ``fan_out`` says which statements may concern several shards: ``"all"``, those whose criteria name
        the shards (``"named"``), or none (``"never"``); others are refused. ``options`` go to
        :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it.

        A statement that fails in one shard fails the transaction on all nodes. COMMIT is one node after
        another: a transaction that writes to two is not atomic unless ``twophase=True``.

        With ``twophase=True`` what is written to several nodes is committed on all of them or on none. All
        nodes but one prepare it; that one commits together with a row that decides for the others. ``shardids
        transaction resolve`` ends what a client that died has left prepared. A transaction that wrote to one
        node is committed as without it. Each node is asked once whether it allows prepared transactions.

        Raises:
            UnsupportedServer: ``twophase=True``, and a node allows no prepared transactions.
            MissingPrivilege: ``twophase=True``, and the role may not decide on a node.
        """
        made: Any = session_class(self._kinds.routed, options.pop("class_", None))
        session: RoutedSession = made(self, fan_out=fan_out, **self._kinds.options, **options)
        if session.twophase:
            self.decisions.require_all_fit(self.placement.nodes.values(), self.engine)
        return session

    @overload
    def run(
        self,
        fn: Callable[[Session], T],
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,
        of: Any = None,
        shard: int | None = None,
        lookup: Any = None,
        after: After | None = None,
        patience_s: float = PATIENCE_S,
        **options: Unpack[SessionOptions],
    ) -> T: ...
    @overload
    def run(
        self,
        fn: Callable[[Theirs], T],
        *,
        class_: type[Theirs],
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> T: ...

    def run(
        self,
        fn: Callable[[Any], T],
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,  # noqa: A002 -- the field's word for it
        of: Any = None,
        shard: int | None = None,
        lookup: Any = None,
        after: After | None = None,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> T:
        """Calls ``fn(session)`` in one transaction on one shard, commits, and returns what ``fn`` returned.

        When the shard is fenced, has moved or is gone, or the connection to its node is lost, this reads the
        placement again and repeats the whole transaction on the shard's new owner. If the old node reports a
        move that the catalog does not show yet, it waits up to ``patience_s`` seconds in all, and now and
        then tries the old node, since a move can be aborted. ``fn`` may therefore run several times: it
        should have no effects but those in ``session``, and leave COMMIT to this method.

        A connection lost during COMMIT is not retried: the transaction may have been committed.

        ``options`` go to :class:`sqlalchemy.orm.Session`. Objects keep what was loaded after the commit
        (``expire_on_commit=False``), so that ``fn`` can return them.

        Raises:
            BadArgument, UnknownId, UnknownValue, UnknownShard: see :meth:`session`.
            ConnectionFailed: the node cannot be reached, and the shard is still on it.
            ShardMoved: the catalog still shows the old node after ``patience_s``.
            ShardFenced: the shard is fenced and is not being moved.
            CommitUncertain: the connection was lost during COMMIT.
        """
        number = self._pick(key, id, shard, of, lookup=lookup, region=region)
        latest = self._latest(after)
        attempts = Attempts(self._followed, number, patience_s)
        while True:
            try:
                return self._transaction(fn, number, attempts.next_node(), latest, options)
            except (ShardidsError, DBAPIError) as error:
                pause_s = attempts.pause_after(error)
            attempts.wait(pause_s)

    def _session(self, shard: int, node: Node, after: int | None, options: dict[str, Any]) -> Session:
        made: Any = session_class(self._kinds.shard, options.pop("class_", None))
        engine = self._engines.of_shard(shard, node)
        session: Session = made(
            engine,
            finder=self._within(shard),
            claims=self._claims,
            shard=shard,
            after=after,
            **self._kinds.options,
            **options,
        )
        return session

    def _transaction(
        self,
        fn: Callable[[Session], T],
        shard: int,
        node: Node,
        after: int | None,
        options: dict[str, Any],
    ) -> T:
        options = {"expire_on_commit": False} | options
        with self._session(shard, node, after, options) as session, session.begin():
            return fn(session)
