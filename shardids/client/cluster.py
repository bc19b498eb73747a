"""Sessions, routing and IDs over all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import Node, Placement, schema_name, shard_for_key
from shardids.client import blocks
from shardids.client.blocks import IdBlock
from shardids.client.copying import ROWS_A_TRANSACTION, Copied, CopyReport, CopySettings, copy_rows, quietly
from shardids.client.engines import NodeEngines
from shardids.client.listener import FollowedPlacement
from shardids.client.retries import PATIENCE_S, Attempts
from shardids.client.routing import EngineChoice, FanOut, Key, RoutedSession, ShardSession, session_class
from shardids.client.routing.twophase import Decisions
from shardids.errors import BadArgument, ShardidsError
from shardids.ids import DecodedId, Layout
from shardids.ids.text import as_integer, shown

T = TypeVar("T")


class Cluster:
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
    ) -> None:
        self._catalog = catalog
        self._description = description
        self._followed = FollowedPlacement(catalog, listen=listen)
        self._engines = NodeEngines(
            catalog.url, engine_options, schema_of=partial(schema_name, description.schema_prefix)
        )
        self.decisions = Decisions(description.cluster)
        self._query_node: QueryNode | None = None

    @classmethod
    def connect(cls, catalog_url: str | URL, *, listen: bool = True, **engine_options: Any) -> Self:
        """Reads the catalog at ``catalog_url``.

        With ``listen=False`` only :meth:`refresh` and :meth:`run` notice a change of the placement: for short
        programs, and for catalogs behind PgBouncer in transaction mode, which drops notifications.

        ``engine_options`` (``pool_size``, ``echo``, ``connect_args`` …) go to
        :func:`sqlalchemy.create_engine` for each node. The nodes are logged in to as the
        user of ``catalog_url``, with its password or else that of ``PGPASSWORD`` or ``~/.pgpass``.

        Raises:
            ConnectionFailed: the catalog cannot be reached.
            ClusterConflict: the database holds no catalog.
        """
        catalog = Catalog(catalog_url)
        try:
            return cls(catalog, catalog.describe(), engine_options, listen=listen)
        except BaseException:
            catalog.close()
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._followed.close()
        self._catalog.close()
        self._engines.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def layout(self) -> Layout:
        """How the cluster's IDs are split."""
        return self._description.layout

    @property
    def shard_count(self) -> int:
        """The number of logical shards, which are 0 … shard_count - 1."""
        return self._description.shard_count

    @property
    def placement(self) -> Placement:
        """Which node holds which shard, as last read from the catalog."""
        return self._followed.current

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

    def shard_for(self, key: Key) -> int:
        """Returns the shard of a key: the same on every machine and in every version.

        See :func:`shardids.catalog.topology.shard_for_key` for the hash.

        Raises:
            UnsupportedKey: a key of another type; ``bool`` and ``float`` among them.
        """
        return shard_for_key(key, self.shard_count)

    def decode(self, id_: int) -> DecodedId:
        """Returns the time, the origin and the sequence of an ID. Raises BadArgument if it cannot be one."""
        return self.layout.decode(id_)

    def shard_of(self, id_: int) -> int:
        """Returns the shard in which an ID was born.

        Raises:
            BadArgument: it is not an ID of this cluster.
        """
        return self._checked(self.layout.shard_of(id_))

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard now.

        Raises:
            BadArgument: the number is not in the cluster.
            UnknownShard: no node holds it yet.
        """
        return self.placement.locate(self._checked(shard))

    def engine(self, node: Node) -> Engine:
        """Returns the engine, with its pool, of a node."""
        return self._engines.of(node)

    def session(
        self,
        *,
        key: Key | None = None,
        id: int | None = None,  # noqa: A002 -- the field's word for it
        shard: int | None = None,
        **options: Any,
    ) -> Session:
        """Returns a plain SQLAlchemy session on one shard: of a key, of an ID's origin, or by number.

        Models without a schema live in the shard's schema, through ``schema_translate_map``. ``options`` go
        to :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it.
        Nothing is connected before the first statement. An object of another shard is refused before anything
        is written.

        Raises:
            BadArgument: not exactly one of ``key``, ``id`` and ``shard``, or a value out of range.
            UnknownShard: no node holds the shard.
        """
        number = self._pick(key, id, shard)
        return self._session(number, self.node_of(number), options)

    def sharded_session(
        self, *, fan_out: FanOut = "allow", engine: EngineChoice = "merge", **options: Any
    ) -> RoutedSession:
        """Returns a SQLAlchemy session over all shards, with one connection and one transaction a node.

        Objects are written where their sharding key, their ID or their parents say. Statements go to the
        shards that their criteria name, as ``User.id == …`` and ``User.name.in_([…])`` do; those that name
        none ask all shards, or are refused with ``fan_out="error"``.

        ``engine`` says what becomes of a statement over several shards. ``"merge"``: the shards' answers are
        combined if that is known to be right; what is not is refused. ``"views"``: a SELECT that would be
        refused is executed on the query node instead, which sees what is committed; it is refused while
        the session has written something that is not. ``"refuse"``: SELECT, UPDATE and DELETE over several
        shards are refused. ``options`` go to
        :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it. COMMIT is
        one node after another: a transaction that writes to two is not atomic unless ``twophase=True``.

        With ``twophase=True`` what is written to several nodes is committed on all of them or on none. All
        nodes but one prepare it; that one commits together with a row that decides for the others. ``shardids
        transaction resolve`` ends what a client that died has left prepared. A transaction that wrote to one
        node is committed as without it. Each node is asked once whether it allows prepared transactions.

        Raises:
            UnsupportedServer: ``twophase=True``, and a node allows no prepared transactions.
            MissingPrivilege: ``twophase=True``, and the role may not decide on a node.
        """
        made: Any = session_class(RoutedSession, options.pop("class_", None))
        session: RoutedSession = made(self, fan_out=fan_out, engine=engine, **options)
        if session.twophase:
            self.decisions.require_all_fit(self.placement.nodes.values(), self.engine)
        return session

    def run(
        self,
        fn: Callable[[Session], T],
        *,
        key: Key | None = None,
        id: int | None = None,  # noqa: A002 -- the field's word for it
        shard: int | None = None,
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
            BadArgument, UnknownShard: see :meth:`session`.
            ConnectionFailed: the node cannot be reached, and the shard is still on it.
            ShardMoved: the catalog still shows the old node after ``patience_s``.
            ShardFenced: the shard is fenced and is not being moved.
            CommitUncertain: the connection was lost during COMMIT.
        """
        number = self._pick(key, id, shard)
        attempts = Attempts(self._followed, number, patience_s)
        while True:
            try:
                return self._transaction(fn, number, attempts.next_node(), options)
            except (ShardidsError, DBAPIError) as error:
                pause_s = attempts.pause_after(error)
            attempts.wait(pause_s)

    def copy(
        self,
        table: Any,
        rows: Any,
        *,
        columns: Sequence[Any] | None = None,
        key: Any = None,
        id: Any = None,  # noqa: A002 -- the field's word for it
        shard: int | None = None,
        on_progress: Callable[[Copied], object] = quietly,
        rows_a_transaction: int = ROWS_A_TRANSACTION,
        patience_s: float = PATIENCE_S,
    ) -> CopyReport:
        """Copies rows into their shards by COPY, over all nodes at once; returns how many each shard got.

        ``table`` is a ``Table`` or a mapped class. ``rows`` is an iterable of mappings, of named tuples, or
        of tuples whose ``columns`` are named; a polars ``DataFrame``; or an Arrow table or record batch
        (extra ``arrow``). All rows have the same columns. IDs are reserved for rows without one; a column
        that the rows lack gets its default, in Python or on the server. Values are written as an INSERT would
        write them, but for SQL expressions.

        A row's shard is told by what the model says: sharding key, ID, foreign keys to either. ``key`` names
        the column to shard by where it does not, and ``id`` one that holds IDs; ``shard`` is one for all
        rows. What tells the shard agrees in each row, and the named column is not NULL.

        Up to ``rows_a_transaction`` rows of a shard are a transaction, and at most ten times as many are in
        memory. It is not one transaction: when it fails, each shard has the first of its rows, in the order
        given, or none. Before that, a transaction that meets a move is repeated on the new owner, as
        :meth:`run` does. IDs that were reserved for rows that were not copied are lost.

        ``on_progress`` is called after each COMMIT with the :class:`shardids.client.copying.Copied` rows and
        IDs.

        Raises:
            BadArgument: the table or the columns are unfit. Nothing was copied.
            CopyFailed: it stopped; it says where and why, and how many rows of each shard are committed.
        """
        settings = CopySettings(
            columns=columns,
            key=key,
            id_=id,
            shard=None if shard is None else self._checked(shard),
            on_progress=on_progress,
            rows_a_transaction=rows_a_transaction,
            patience_s=patience_s,
        )
        return copy_rows(self, table, rows, settings, followed=self._followed, engine_of=self.engine)

    def connection(self, shard: int) -> Connection:
        """Returns a Core connection on one shard, with the same ``schema_translate_map``."""
        return self.shard_engine(shard).connect()

    def shard_engine(self, shard: int) -> Engine:
        """Returns the node's engine as seen from one shard: it shares the node's pool."""
        return self._engines.of_shard(shard, self.node_of(shard))

    def schema_of(self, shard: int) -> str:
        """Returns the name of a shard's schema."""
        return schema_name(self._description.schema_prefix, shard)

    def reserve(self, shard: int, count: int) -> IdBlock:
        """Sets ``count`` IDs of a shard aside in one call; see :class:`shardids.client.blocks.IdBlock`.

        Raises:
            BadArgument: a count below 1 or above the node's ``max_reserve``.
            ShardFenced, ShardMoved, TooFarAhead, TimeExhausted: as they say.
        """
        number = self._checked(shard)
        with self.engine(self.node_of(number)).begin() as connection:
            return blocks.reserve(connection, number, count, self.layout)

    def _session(self, shard: int, node: Node, options: dict[str, Any]) -> Session:
        made: Any = session_class(ShardSession, options.pop("class_", None))
        session: Session = made(self._engines.of_shard(shard, node), finder=self, shard=shard, **options)
        return session

    def _transaction(self, fn: Callable[[Session], T], shard: int, node: Node, options: dict[str, Any]) -> T:
        options = {"expire_on_commit": False} | options
        with self._session(shard, node, options) as session, session.begin():
            return fn(session)

    def _pick(self, key: Key | None, id_: int | None, shard: int | None) -> int:
        if [key, id_, shard].count(None) != 2:
            raise BadArgument("a session takes exactly one of key=, id= and shard=")
        if key is not None:
            return self.shard_for(key)
        if id_ is not None:
            return self.shard_of(id_)
        return self._checked(shard)

    def _checked(self, shard: int | None) -> int:
        number = as_integer("a shard", shard)
        if not 0 <= number < self.shard_count:
            raise BadArgument(
                f"there is no shard {shown(number)} in this cluster",
                hint=f"Shards are numbered 0 to {self.shard_count - 1}.",
            )
        return number
