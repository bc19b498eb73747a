""":class:`shardids.Cluster` for asyncio, with psycopg's async mode."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Task, gather, get_running_loop, to_thread
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from shardids.catalog.references import WITHIN_S
from shardids.catalog.topology import Node, Placement
from shardids.client.blocks import IdBlock
from shardids.client.cluster import Cluster
from shardids.client.copying.copy import CopyOptions, CopyReport, copied_in_thread
from shardids.client.old_ids import KnownOldIds
from shardids.client.placement import PATIENCE_S, MustBeAwaited
from shardids.client.references import ReferenceSession
from shardids.client.routing.models import Key
from shardids.client.routing.nodes import FanOut
from shardids.client.routing.sessions import session_class
from shardids.client.shard import ById, ByKey, ByLookup, ByNumber, SessionOptions, Shard
from shardids.ids import DecodedId, Layout

T = TypeVar("T")
Theirs = TypeVar("Theirs", bound=AsyncSession)


class AsyncSessionOptions(SessionOptions, total=False):
    """The keywords of :class:`sqlalchemy.ext.asyncio.AsyncSession`, except ``bind`` and ``binds``."""

    sync_session_class: type[Session]


def _create_engine(url: URL, **options: Any) -> Engine:
    return create_async_engine(url, **options).sync_engine


def _async_session(ours: Any, options: dict[str, Any], **own: Any) -> AsyncSession:
    """Return an ``AsyncSession``, or one of ``class_``, around a session of shardids."""
    class_: type[AsyncSession] = options.pop("class_", AsyncSession)
    theirs: Any = options.pop("sync_session_class", class_.sync_session_class)
    return class_(sync_session_class=session_class(ours, theirs), **own, **options)


class AsyncShard:
    """A :class:`shardids.Shard` for one event loop: what asks a server is awaited.

    Awaited itself, it asks which shard it is where that has to be asked: for a ``lookup``, and for some IDs
    from before the cluster. ``shard = await cluster.at(lookup=…)`` has its :attr:`number`;
    :meth:`run` and :meth:`reserve` also ask.
    """

    __slots__ = ("_cluster", "_found", "_where")

    def __init__(self, cluster: Cluster, where: dict[str, Any]) -> None:
        self._cluster = cluster
        self._where = where
        self._found: Shard | None = None
        with suppress(MustBeAwaited):
            self._found = cluster.at(**where)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._asked().__await__()

    async def _asked(self) -> Self:
        if self._found is None:
            self._found = await greenlet_spawn(self._cluster.at, **self._where)
        return self

    @property
    def sync_shard(self) -> Shard:
        """The shard that is wrapped; its engine and connections can be used inside ``run_sync`` only.

        Raises:
            BadArgument: it has to be asked which shard it is, and was not awaited.
        """
        return self._cluster.at(**self._where) if self._found is None else self._found

    @property
    def number(self) -> int:
        """See :attr:`shardids.Shard.number`."""
        return self.sync_shard.number

    @property
    def node(self) -> Node:
        """See :attr:`shardids.Shard.node`."""
        return self.sync_shard.node

    @property
    def engine(self) -> AsyncEngine:
        """See :attr:`shardids.Shard.engine`."""
        return AsyncEngine(self.sync_shard.engine)

    def connection(self) -> AsyncConnection:
        """Return a Core connection on the shard, to be used with ``async with`` or ``await``."""
        return self.engine.connect()

    async def reserve(self, count: int) -> IdBlock:
        """Set IDs aside; see :meth:`shardids.Shard.reserve`, also for the errors."""
        return await greenlet_spawn((await self).sync_shard.reserve, count)

    @overload
    def session(self, **options: Unpack[AsyncSessionOptions]) -> AsyncSession: ...
    @overload
    def session(self, *, class_: type[Theirs], **options: Any) -> Theirs: ...

    def session(self, **options: Any) -> AsyncSession:
        """Return an ``AsyncSession`` on the shard, as :meth:`shardids.Shard.session` does.

        ``options`` go to :class:`sqlalchemy.ext.asyncio.AsyncSession`.
        """
        return self._session(self.sync_shard, self.node, options)

    @overload
    async def run(
        self,
        fn: Callable[[AsyncSession], Awaitable[T]],
        *,
        patience_s: float = ...,
        **options: Unpack[AsyncSessionOptions],
    ) -> T: ...
    @overload
    async def run(
        self,
        fn: Callable[[Theirs], Awaitable[T]],
        *,
        class_: type[Theirs],
        patience_s: float = ...,
        **options: Any,
    ) -> T: ...

    async def run(
        self, fn: Callable[[Any], Awaitable[T]], *, patience_s: float = PATIENCE_S, **options: Any
    ) -> T:
        """Await ``fn(session)`` in one transaction on the shard, commit, and return its result.

        If the shard has moved, or is about to, the transaction is repeated: ``fn`` may run several times. See
        :meth:`shardids.Shard.run`, also for the errors. ``options`` are those of :meth:`session`;
        ``expire_on_commit`` is false unless they say otherwise.
        """
        shard = (await self).sync_shard
        kept = {"expire_on_commit": False} | options

        async def transaction(node: Node) -> T:
            async with self._session(shard._at(attempts.shard), node, dict(kept)) as session, session.begin():
                return await fn(session)

        attempts = shard._attempts(patience_s)
        with self._cluster._kinds.running(shard.number, attempts):
            return await greenlet_spawn(attempts.repeat, lambda node: await_only(transaction(node)))

    def _session(self, shard: Shard, node: Node, options: dict[str, Any]) -> AsyncSession:
        engine = AsyncEngine(self._cluster._engines.of_shard(shard.number, node))
        return _async_session(self._cluster._kinds.shard, options, bind=engine, **shard._facts())


class AsyncCluster:
    """A sharded cluster for one event loop.

    It wraps a :class:`~shardids.Cluster` as SQLAlchemy's ``AsyncEngine`` wraps an ``Engine``: methods that
    ask a server are awaited, the others are not. The catalog is read, and listened to, in threads.

    Attributes:
        sync_cluster: the wrapped cluster. Its engines use the async driver, one engine per node: they work
            inside ``run_sync`` only.
    """

    def __init__(self, sync_cluster: Cluster) -> None:
        self.sync_cluster = sync_cluster
        sync_cluster._followed.asks_in_threads = True
        self._preparing: set[Task[None]] = set()

    @classmethod
    async def connect(cls, catalog_url: str | URL, *, listen: bool = True, **engine_options: Any) -> Self:
        """Read the catalog; see :meth:`shardids.Cluster.connect`, also for the errors.

        ``engine_options`` go to :func:`sqlalchemy.ext.asyncio.create_async_engine` for each node.
        """
        options = {"create": _create_engine} | engine_options
        cluster = cls(await to_thread(Cluster.connect, catalog_url, listen=listen, **options))
        followed = cluster.sync_cluster._followed
        followed.on_arrival = partial(cluster._on_arrival, get_running_loop())
        await to_thread(followed.follow)
        return cluster

    def _on_arrival(self, loop: AbstractEventLoop, *move: Any) -> None:
        def prepare() -> None:
            preparing = greenlet_spawn(self.sync_cluster._engines.prepare_for_move, *move)
            task = loop.create_task(preparing)
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(prepare)

    async def close(self) -> None:
        """Close all connections."""
        self.sync_cluster._followed.on_arrival = lambda *_move: None
        await gather(*self._preparing)
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

    @property
    def layout(self) -> Layout:
        """See :attr:`shardids.Cluster.layout`."""
        return self.sync_cluster.layout

    @property
    def shard_count(self) -> int:
        """See :attr:`shardids.Cluster.shard_count`."""
        return self.sync_cluster.shard_count

    @property
    def placement(self) -> Placement:
        """See :attr:`shardids.Cluster.placement`."""
        return self.sync_cluster.placement

    @property
    def old_ids(self) -> KnownOldIds | None:
        """See :attr:`shardids.Cluster.old_ids`."""
        return self.sync_cluster.old_ids

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """See :meth:`shardids.Cluster.shard_for`."""
        return self.sync_cluster.shard_for(key, region=region)

    def decode(self, id_: int) -> DecodedId:
        """See :meth:`shardids.Cluster.decode`."""
        return self.sync_cluster.decode(id_)

    def shard_of(self, id_: int | UUID, *, of: Any = None) -> int:
        """See :meth:`shardids.Cluster.shard_of`. In the event loop it asks nobody.

        Raises:
            BadArgument: also if somebody would have to be asked: ``await cluster.at(id=…)`` asks.
        """
        return self.sync_cluster.shard_of(id_, of=of)

    def node_of(self, shard: int) -> Node:
        """See :meth:`shardids.Cluster.node_of`."""
        return self.sync_cluster.node_of(shard)

    def schema_of(self, shard: int) -> str:
        """See :meth:`shardids.Cluster.schema_of`."""
        return self.sync_cluster.schema_of(shard)

    async def query_node(self) -> Node | None:
        """See :meth:`shardids.Cluster.query_node`."""
        return await to_thread(self.sync_cluster.query_node)

    async def refresh(self) -> bool:
        """See :meth:`shardids.Cluster.refresh`."""
        return await to_thread(self.sync_cluster.refresh)

    def engine(self, node: Node) -> AsyncEngine:
        """Return the engine, with its pool, of a node."""
        return AsyncEngine(self.sync_cluster.engine(node))

    @overload
    def at(self, **where: Unpack[ByKey]) -> AsyncShard: ...
    @overload
    def at(self, **where: Unpack[ById]) -> AsyncShard: ...
    @overload
    def at(self, **where: Unpack[ByLookup]) -> AsyncShard: ...
    @overload
    def at(self, **where: Unpack[ByNumber]) -> AsyncShard: ...

    def at(self, **where: Any) -> AsyncShard:
        """Return one shard, named as in :meth:`shardids.Cluster.at`, also for the errors.

        ``await cluster.at(…)`` asks which shard it is, where a server has to be asked for it.
        """
        return AsyncShard(self.sync_cluster, where)

    @overload
    def session(self, **where: Unpack[ByKey]) -> AsyncSession: ...
    @overload
    def session(self, **where: Unpack[ById]) -> AsyncSession: ...
    @overload
    def session(self, **where: Unpack[ByLookup]) -> AsyncSession: ...
    @overload
    def session(self, **where: Unpack[ByNumber]) -> AsyncSession: ...

    def session(self, **where: Any) -> AsyncSession:
        """Return an ``AsyncSession`` on one shard: short for ``at(…).session()``.

        An old ID or a ``lookup``, whose shard would have to be asked for, is refused:
        ``(await cluster.at(lookup=…)).session()`` asks.
        """
        return self.at(**where).session()

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
        """Return an ``AsyncSession`` over all shards; see :meth:`shardids.Cluster.sharded_session`.

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
        """Return an ``AsyncSession`` where reference tables are written to.

        See :meth:`shardids.Cluster.reference_session`: ``async with await cluster.reference_session() as
        session``.
        """
        references = self.sync_cluster._references
        node = await to_thread(references.writer)
        own = references.waiting(node, wait, within_s)
        return _async_session(ReferenceSession, dict(options), bind=self.engine(node), **own)

    async def copy(self, table: Any, rows: Any, **options: Unpack[CopyOptions]) -> CopyReport:
        """Copy rows into their shards by COPY; see :meth:`shardids.Cluster.copy`, also for the errors.

        It runs in threads and opens one connection per node, with the cluster's ``connect_args`` and no
        other engine options. A thread reads ``rows``, or the loop if they are an async iterable;
        ``on_progress`` is called in the loop. A cancelled copy ends as a failed one does.
        """
        cluster = self.sync_cluster
        return await copied_in_thread(cluster, table, rows, cluster._copy_settings(options))
