""":class:`shardids.Cluster` for asyncio, with psycopg's async mode."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import greenlet_spawn

from shardids.catalog.references import WITHIN_S
from shardids.catalog.topology import Node
from shardids.client import blocks
from shardids.client.async_finding import AsyncShardsOfCluster
from shardids.client.blocks import IdBlock
from shardids.client.cluster import Cluster
from shardids.client.copying import ROWS_A_TRANSACTION, Copied, CopyReport, CopySettings, quietly
from shardids.client.copying.from_asyncio import copied_in_thread
from shardids.client.options import AsyncSessionOptions
from shardids.client.references import ReferenceSession
from shardids.client.retries import PATIENCE_S, Attempts
from shardids.client.routing import After, FanOut, Key, session_class
from shardids.errors import ShardidsError

T = TypeVar("T")
Theirs = TypeVar("Theirs", bound=AsyncSession)


def _create_engine(url: URL, **options: Any) -> Engine:
    return create_async_engine(url, **options).sync_engine


def _async_session(ours: Any, options: dict[str, Any], **own: Any) -> AsyncSession:
    """Returns an ``AsyncSession``, or one of ``class_``, around a session of shardids."""
    class_: type[AsyncSession] = options.pop("class_", AsyncSession)
    theirs: Any = options.pop("sync_session_class", class_.sync_session_class)
    return class_(sync_session_class=session_class(ours, theirs), **own, **options)


class AsyncCluster(AsyncShardsOfCluster):
    """A sharded cluster for one event loop; needs the extra ``shardids[asyncio]``.

    It wraps a :class:`~shardids.Cluster` as SQLAlchemy's ``AsyncEngine`` wraps an ``Engine``: methods that
    ask a server are awaited, the others are not. The catalog is read, and listened to, in threads.

    Attributes:
        sync_cluster: what is wrapped. Its engines are those of the async driver, one a node: they can be
            used inside ``run_sync`` only.
    """

    def __init__(self, sync_cluster: Cluster) -> None:
        super().__init__(sync_cluster)
        sync_cluster._old_ids.asks_in_threads = True
        sync_cluster._claims.asks_in_threads = True

    @classmethod
    async def connect(cls, catalog_url: str | URL, *, listen: bool = True, **engine_options: Any) -> Self:
        """Reads the catalog; see :meth:`shardids.Cluster.connect`, also for the errors.

        ``engine_options`` go to :func:`sqlalchemy.ext.asyncio.create_async_engine` for each node.
        """
        options = {"create": _create_engine} | engine_options
        return cls(await to_thread(Cluster.connect, catalog_url, listen=listen, **options))

    async def close(self) -> None:
        """Closes all connections."""
        for engine in self.sync_cluster._engines.made():
            await AsyncEngine(engine).dispose()
        await to_thread(self.sync_cluster.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def query_node(self) -> Node | None:
        """See :meth:`shardids.Cluster.query_node`."""
        return await to_thread(self.sync_cluster.query_node)

    async def refresh(self) -> bool:
        """See :meth:`shardids.Cluster.refresh`."""
        return await to_thread(self.sync_cluster.refresh)

    def engine(self, node: Node) -> AsyncEngine:
        """Returns the engine, with its pool, of a node."""
        return AsyncEngine(self.sync_cluster.engine(node))

    def shard_engine(self, shard: int) -> AsyncEngine:
        """Returns the node's engine as seen from one shard: it shares the node's pool."""
        return AsyncEngine(self.sync_cluster.shard_engine(shard))

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
        **options: Unpack[AsyncSessionOptions],
    ) -> AsyncSession: ...
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
    ) -> AsyncSession:
        """Returns an ``AsyncSession`` on one shard, as :meth:`shardids.Cluster.session` does.

        An old ID or a ``lookup``, whose shard would have to be asked for, is refused, but not by
        :meth:`run`. ``options`` go to :class:`sqlalchemy.ext.asyncio.AsyncSession`.
        """
        number = self.sync_cluster._pick(key, id, shard, of, lookup=lookup, region=region)
        return self._session(number, self.node_of(number), self.sync_cluster._latest(after), options)

    @overload
    def sharded_session(
        self,
        *,
        fan_out: FanOut = "all",
        **options: Unpack[AsyncSessionOptions],
    ) -> AsyncSession: ...
    @overload
    def sharded_session(
        self,
        *,
        class_: type[Theirs],
        fan_out: FanOut = "all",
        **options: Any,
    ) -> Theirs: ...

    def sharded_session(self, *, fan_out: FanOut = "all", **options: Any) -> AsyncSession:
        """Returns an ``AsyncSession`` over all shards; see :meth:`shardids.Cluster.sharded_session`.

        ``options`` go to :class:`sqlalchemy.ext.asyncio.AsyncSession`.
        """
        return _async_session(
            self.sync_cluster._kinds.routed,
            options,
            shards=self.sync_cluster,
            fan_out=fan_out,
            **self.sync_cluster._kinds.options,
        )

    async def reference_session(
        self, *, wait: bool = False, within_s: float = WITHIN_S, **options: Unpack[AsyncSessionOptions]
    ) -> AsyncSession:
        """Returns an ``AsyncSession`` where reference tables are written to.

        See :meth:`shardids.Cluster.reference_session`: ``async with await cluster.reference_session() as
        session``.
        """
        node = await to_thread(self.sync_cluster._reference_writer)
        own = self.sync_cluster._waiting(node, wait, within_s)
        engine = AsyncEngine(self.sync_cluster._engines.of(node))
        return _async_session(ReferenceSession, dict(options), bind=engine, **own)

    def connection(self, shard: int) -> AsyncConnection:
        """Returns a Core connection on one shard, to be used with ``async with`` or ``await``."""
        return self.shard_engine(shard).connect()

    async def reserve(self, shard: int, count: int, *, after: After | None = None) -> IdBlock:
        """Sets IDs of a shard aside; see :meth:`shardids.Cluster.reserve`, also for the errors."""
        number, latest = self.sync_cluster._checked(shard), self.sync_cluster._latest(after)
        async with self.shard_engine(number).begin() as connection:
            return await connection.run_sync(blocks.reserve, number, count, self.layout, after=latest)

    async def copy(
        self,
        table: Any,
        rows: Any,
        *,
        columns: Sequence[Any] | None = None,
        key: Any = None,
        region: str | None = None,
        id: Any = None,  # noqa: A002 -- the field's word for it
        shard: int | None = None,
        on_progress: Callable[[Copied], object] = quietly,
        rows_a_transaction: int = ROWS_A_TRANSACTION,
        patience_s: float = PATIENCE_S,
    ) -> CopyReport:
        """Copies rows into their shards by COPY; see :meth:`shardids.Cluster.copy`, also for the errors.

        It runs in threads, over connections of its own, one a node, which have the ``connect_args`` of the
        cluster's and no other engine options. ``rows`` are read in a thread, or in the loop if they are an
        async iterable; ``on_progress`` is called in the loop. A cancelled copy ends as one that failed.
        """
        cluster = self.sync_cluster
        settings = CopySettings(
            columns=columns,
            key=key,
            region=region,
            id_=id,
            shard=None if shard is None else cluster._checked(shard),
            on_progress=on_progress,
            rows_a_transaction=rows_a_transaction,
            patience_s=patience_s,
        )
        engines = cluster._engines.for_copying()
        return await copied_in_thread(
            cluster, table, rows, settings, followed=cluster._followed, engines=engines
        )

    @overload
    async def run(
        self,
        fn: Callable[[AsyncSession], Awaitable[T]],
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,
        of: Any = None,
        shard: int | None = None,
        lookup: Any = None,
        after: After | None = None,
        patience_s: float = PATIENCE_S,
        **options: Unpack[AsyncSessionOptions],
    ) -> T: ...
    @overload
    async def run(
        self,
        fn: Callable[[Theirs], Awaitable[T]],
        *,
        class_: type[Theirs],
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> T: ...

    async def run(
        self,
        fn: Callable[[Any], Awaitable[T]],
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
        """Awaits ``fn(session)`` in one transaction on one shard, commits, and returns what it returned.

        If the shard has moved, or is about to, the transaction is repeated: ``fn`` may run several times. See
        :meth:`shardids.Cluster.run`, also for the errors. ``options`` go to
        :class:`sqlalchemy.ext.asyncio.AsyncSession`; ``expire_on_commit`` is false unless they say otherwise.
        """
        number = await greenlet_spawn(
            self.sync_cluster._pick, key, id, shard, of, lookup=lookup, region=region
        )
        latest = self.sync_cluster._latest(after)
        attempts = Attempts(self.sync_cluster._followed, number, patience_s)
        while True:
            try:
                return await self._transaction(fn, number, attempts.next_node(), latest, options)
            except (ShardidsError, DBAPIError) as error:
                pause_s = await to_thread(attempts.pause_after, error)
            await attempts.wait_in_loop(pause_s)

    async def _transaction(
        self,
        fn: Callable[[AsyncSession], Awaitable[T]],
        shard: int,
        node: Node,
        after: int | None,
        options: dict[str, Any],
    ) -> T:
        options = {"expire_on_commit": False} | options
        async with self._session(shard, node, after, options) as session, session.begin():
            return await fn(session)

    def _session(self, shard: int, node: Node, after: int | None, options: dict[str, Any]) -> AsyncSession:
        engine = AsyncEngine(self.sync_cluster._engines.of_shard(shard, node))
        cluster = self.sync_cluster
        return _async_session(
            cluster._kinds.shard,
            options,
            bind=engine,
            finder=cluster._within(shard),
            claims=cluster.claims,
            shard=shard,
            after=after,
            **cluster._kinds.options,
        )
