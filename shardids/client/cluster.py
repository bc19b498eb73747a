"""Sessions, routing and IDs over all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from shardids.catalog.keys.known import KnownHomes, digest_of
from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.references import WITHIN_S
from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import (
    Node,
    Placement,
    no_shard,
    schema_name,
    shard_of_digest,
)
from shardids.client.breaker import Breakers
from shardids.client.engines import NodeEngines, substitute
from shardids.client.lookups import Claims, shard_of_criterion
from shardids.client.metering import SessionKinds
from shardids.client.old_ids import KnownOldIds, MovedIds, how_ids_tell
from shardids.client.placement import FollowedPlacement
from shardids.client.references import ReferenceSession, ReferenceWriter
from shardids.client.routing.models import Key, Tells
from shardids.client.routing.nodes import FanOut
from shardids.client.routing.one_shard import After
from shardids.client.routing.sessions import RoutedSession, session_class
from shardids.client.routing.twophase import Decisions
from shardids.client.shard import ById, ByKey, ByLookup, ByNumber, SessionOptions, Shard
from shardids.client.tracing import Traces
from shardids.errors import BadArgument, UnknownId
from shardids.ids import DecodedId, Layout
from shardids.ids.text import as_integer, checked_integer

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from shardids.client.copying.copy import CopyOptions, CopyReport, CopySettings

Theirs = TypeVar("Theirs", bound=Session)


class Cluster:
    """A sharded cluster as its catalog describes it; safe to share between threads.

    Open one with :meth:`connect`. It holds one engine, so one connection pool, per node, whatever the
    number of shards. It keeps routing by the placement it knows while the catalog is down.

    From the first use of the placement or the directory of keys on, a thread listens to the catalog over its
    own connection, so that a change is known as soon as it is committed. That use waits until the placement
    is read once more, for changes since :meth:`connect`. After a fork the child makes its own connections.

    Attributes:
        decisions: what sessions share that commit on several nodes.
        claims: claims the values of look-up keys, and finds the shards of those that are claimed.
        moved_ids: finds the shards of rows that have left the one they were born in.
    """

    def __init__(
        self,
        catalog: Catalog,
        description: Description,
        engine_options: dict[str, Any],
        *,
        listen: bool = True,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._catalog = catalog
        self._description = description
        prefix = description.schema_prefix
        traces = None if tracer is None else Traces(tracer, prefix, lambda: self._followed.last_read)
        self._kinds = kinds = SessionKinds(meter, traces)
        self._followed = FollowedPlacement(catalog, listen=listen, on_retry=kinds.on_retry)
        schema_of = partial(schema_name, prefix)
        self._breakers = Breakers(kinds.on_refused_call)
        if kinds.meters is not None:
            kinds.meters.show_breakers(self._breakers, self._followed)
        self._engines = NodeEngines(
            catalog.url,
            engine_options,
            schema_of=schema_of,
            breakers=self._breakers,
            on_made=kinds.on_engine,
        )
        self._followed.on_arrival = self._engines.prepare_for_move
        self._claiming = self._engines.for_claims()
        self._old_ids = KnownOldIds(
            catalog,
            self._followed,
            self._engines.for_copying(),
            shard_count=description.shard_count,
            schema_of=schema_of,
        )
        self.moved_ids = MovedIds(catalog, self._followed)
        self.claims = Claims(
            self._followed,
            self._claiming.of,
            shard_count=description.shard_count,
            schema_of=schema_of,
            on_clash=kinds.on_clash,
        )
        self._references = ReferenceWriter(catalog, self._followed, self._engines.of, description.cluster)
        self.decisions = Decisions(description.cluster, lambda: substitute() is None)
        self._query_node: QueryNode | None = None

    @classmethod
    def connect(
        cls,
        catalog_url: str | URL,
        *,
        listen: bool = True,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
        **engine_options: Any,
    ) -> Self:
        """Read the catalog at ``catalog_url``.

        With ``listen=False`` only :meth:`refresh` and :meth:`run` notice a change of the placement: for short
        programs, and for catalogs behind PgBouncer in transaction mode, which drops notifications.

        ``meter`` is an OpenTelemetry meter: it counts sessions, retries, refusals and fan-outs, and records
        the duration of statements. ``tracer`` is an OpenTelemetry tracer: it gets spans of sessions, of
        statements and of the repetitions of :meth:`run`.

        ``engine_options`` (``pool_size``, ``echo``, ``connect_args`` …) go to
        :func:`sqlalchemy.create_engine` for each node. The nodes are logged in to as the
        user of ``catalog_url``, with its password or else that of ``PGPASSWORD`` or ``~/.pgpass``.

        Raises:
            ConnectionFailed: the catalog cannot be reached.
            ClusterConflict: the database holds no catalog.
        """
        catalog = Catalog(catalog_url)
        try:
            return cls(catalog, catalog.describe(), engine_options, listen=listen, meter=meter, tracer=tracer)
        except BaseException:
            catalog.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._followed.close()
        self._catalog.close()
        self._engines.dispose()
        self._old_ids.close()
        self._claiming.dispose()

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
        """The number of shards that keys are hashed over: 0 … shard_count - 1.

        A key may have its own shard, after these: ``placement.all_shards()`` has all.
        """
        return self._description.shard_count

    @property
    def placement(self) -> Placement:
        """Which node holds which shard, as last read from the catalog."""
        return self._followed.current

    @property
    def homes(self) -> KnownHomes:
        """The directory of keys as last read: keys that live in another shard than that of their hash."""
        return self._followed.homes

    @property
    def old_ids(self) -> KnownOldIds | None:
        """The shards of IDs that were issued before the cluster; ``None`` if no table was adopted."""
        return None if self._followed.old_ids is None else self._old_ids

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """Return the shard where a key's rows live: by the directory of keys, or else by the key's hash.

        With ``region`` it is one of that region's shards, as long as there is the region; without, one of
        all. See :func:`shardids.catalog.topology.shard_for_key` for the hash, which is the same on every
        machine and in every version.

        Raises:
            BadArgument: the placement as last read has no such region.
            UnsupportedKey: a key of another type; ``bool`` and ``float`` among them.
        """
        homes = self._followed.homes
        if region is not None:
            there = existing_region(region, self.placement.regions)
            home = homes.shard_of(digest_of(key, region)) if homes else None
            return there.shard_for(key) if home is None else home
        digest = digest_of(key)
        home = homes.shard_of(digest) if homes else None
        return shard_of_digest(digest, self.shard_count) if home is None else home

    def decode(self, id_: int) -> DecodedId:
        """Return the time, the origin and the sequence of an ID.

        Raises:
            BadArgument: it cannot be one, or it was issued before the cluster and has none of these.
        """
        if self._followed.old_ids is not None and self._old_ids.has(id_):
            raise BadArgument(
                f"ID {id_} was issued before this cluster: it contains no time and no shard",
                hint="To find the shard of its row: cluster.shard_of(id, of=User)",
            )
        return self.layout.decode(id_)

    def shard_of(self, id_: int | UUID, *, of: Any = None) -> int:
        """Return the shard of the row with an ID: the one that issued it, unless the row has left it.

        Rows leave the shard that they were born in when their key is moved. For an ID that may be of such a
        row and that it has not seen yet, this asks the catalog.

        An old ID was issued before the cluster, and rows of several tables may have it: ``of`` names the
        mapped class, the table or its name. New IDs do not need it. For an old ID that it has not seen yet,
        this asks the catalog or, by rule ``fan-out``, every shard. With ``of``, the primary key may be a
        sharding key.

        Raises:
            BadArgument: it is not an ID of this cluster, or an old ID without ``of``, or of a table that was
                not adopted.
            UnknownId: an ID of no shard of this cluster, or an old one that no row had.
        """
        if self._followed.old_ids is None and (of is None or isinstance(of, str)):
            return self._origin(id_)  # type: ignore[arg-type]  # refuses what is not an integer
        told = how_ids_tell(of)
        if isinstance(told, Tells):
            if told.kind is not None:
                return told.shard(id_, self)
            told = told.table
        if self._followed.old_ids is not None and self._old_ids.has(id_):  # type: ignore[arg-type]  # see above
            return self._old_ids.shard_of(id_, told)  # type: ignore[arg-type]  # see above
        return self._origin(id_)  # type: ignore[arg-type]  # see above

    def _origin(self, id_: int) -> int:
        if type(id_) is int:
            try:
                origin = self._checked(self.layout.shard_of(id_))
            except BadArgument as error:
                # An integer that is not an ID of a shard is a value that no row has, not a wrong type.
                raise UnknownId(error.message, hint=error.hint) from None
        else:
            origin = self._checked(self.layout.shard_of(id_))
        return self.moved_ids.shard_of(id_, origin) if self._followed.homes.departures else origin

    def node_of(self, shard: int) -> Node:
        """Return the node that holds a shard now.

        Raises:
            BadArgument: the number is not in the cluster.
            UnknownShard: no node holds it yet.
        """
        return self.placement.locate(self._checked(shard))

    def schema_of(self, shard: int) -> str:
        """Return the name of a shard's schema."""
        return schema_name(self._description.schema_prefix, shard)

    def query_node(self) -> Node | None:
        """Return the database whose views show the rows of all shards, if the cluster has one.

        Raises:
            ConnectionFailed: the catalog cannot be reached, and it was not asked before.
        """
        if self._query_node is None:
            self._query_node = query_node_of(self._catalog)
        return None if self._query_node is None else self._query_node.address(self.placement)

    def refresh(self) -> bool:
        """Read the placement again; return whether it could.

        If the catalog is down, the known placement stays in use and a warning is logged.
        """
        self._query_node = None
        return self._followed.try_refresh()

    def engine(self, node: Node) -> Engine:
        """Return the engine, with its pool, of a node."""
        return self._engines.of(node)

    @overload
    def at(self, **where: Unpack[ByKey]) -> Shard: ...
    @overload
    def at(self, **where: Unpack[ById]) -> Shard: ...
    @overload
    def at(self, **where: Unpack[ByLookup]) -> Shard: ...
    @overload
    def at(self, **where: Unpack[ByNumber]) -> Shard: ...

    def at(
        self,
        *,
        key: Key | None = None,
        region: str | None = None,
        id: int | UUID | None = None,  # noqa: A002 -- the field's word for it
        of: Any = None,
        lookup: Any = None,
        shard: int | None = None,
        after: After | None = None,
    ) -> Shard:
        """Return one shard: of a key, of an ID's origin, of a row with a look-up key, or by number::

            cluster.at(key="ann")
            cluster.at(id=photo_id)
            cluster.at(lookup=User.email == "ann@example.com")
            cluster.at(shard=5)

        ``region``, beside ``key``, says that the key is among that region's shards: see :meth:`shard_for`.
        ``of``, beside ``id``, says whose ID it is, for those that were issued before the cluster: see
        :meth:`shard_of`. ``lookup`` is a criterion on a look-up key.

        ``after`` is an ID, or several: rows that the shard's sessions write get IDs that sort after them,
        whatever the nodes' clocks show. Each transaction first checks the shard, and raises it if necessary;
        ``docs/explanation/order.md`` describes this.

        Raises:
            BadArgument: not exactly one of ``key``, ``id``, ``lookup`` and ``shard``, or one out of range, or
                no such region; or ``after`` is not an ID of this cluster, or an old one.
            UnknownValue: no row has the value of a look-up key.
            UnknownId: an old ID that no row had.
        """
        # A criterion has no truth value, so it is not compared.
        if (key is None) + (id is None) + (lookup is None) + (shard is None) != 3:
            raise BadArgument("name a shard by exactly one of key=, id=, lookup= and shard=")
        if of is not None and id is None:
            raise BadArgument("of= names the table of an ID, and requires id=")
        if region is not None and key is None:
            raise BadArgument("region= names the region of a key, and requires key=")
        latest = None if after is None else self._latest(after)
        locate: Callable[[], int]
        if key is not None:
            locate = partial(self.shard_for, key, region=region)
        elif id is not None:
            locate = partial(self.shard_of, id, of=of)
        elif lookup is not None:
            locate = partial(shard_of_criterion, lookup, self.claims)
        else:
            return Shard(self, self._checked(shard), latest)
        # Before the shard: one that was found by an older directory is found again.
        located_at = self._followed.homes.version
        return Shard(self, locate(), latest, locate, located_at)

    @overload
    def session(self, **where: Unpack[ByKey]) -> Session: ...
    @overload
    def session(self, **where: Unpack[ById]) -> Session: ...
    @overload
    def session(self, **where: Unpack[ByLookup]) -> Session: ...
    @overload
    def session(self, **where: Unpack[ByNumber]) -> Session: ...

    def session(self, **where: Any) -> Session:
        """Return a plain SQLAlchemy session on one shard: short for ``at(…).session()``.

        See :meth:`at` and :meth:`shardids.Shard.session`, also for the errors.
        """
        return self.at(**where).session()

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
        """Return a SQLAlchemy session over all shards, with one connection and one transaction per node.

        The sharding key, the ID or the parents of an object determine its shard. Statements go to the shards
        that their criteria name, as ``User.id == …`` and ``User.name.in_([…])`` do; statements that name no
        shard go to all. The session merges the rows of several shards; the query node computes everything
        that needs PostgreSQL over all of them. The query node sees committed rows only, so the session does
        not ask it about tables that it has written to.

        ``fan_out`` says which statements may concern several shards: ``"all"``, those whose criteria name
        the shards (``"named"``), or none (``"never"``); others are refused. ``options`` go to
        :class:`sqlalchemy.orm.Session`, or to ``class_``, a class of yours derived from it.

        A statement that fails in one shard fails the transaction on all nodes. COMMIT is one node after
        another: a transaction that writes to two is not atomic unless ``twophase=True``.

        With ``twophase=True`` a transaction commits on all nodes that it wrote to, or on none. All these
        nodes except one prepare it; that one commits it together with a row that decides for the others.
        ``shardids transactions --resolve`` ends transactions that a dead client left prepared. A transaction
        that wrote to one node commits as without it. The session checks once per node that the node allows
        prepared transactions.

        Raises:
            UnsupportedServer: ``twophase=True``, and a node allows no prepared transactions.
            MissingPrivilege: ``twophase=True``, and the role may not decide on a node.
        """
        made: Any = session_class(self._kinds.routed, options.pop("class_", None))
        session: RoutedSession = made(self, fan_out=fan_out, **self._kinds.options, **options)
        if session.twophase:
            self.decisions.require_all_fit(self.placement.nodes.values(), self.engine)
        return session

    def reference_session(
        self, *, wait: bool = False, within_s: float = WITHIN_S, **options: Unpack[SessionOptions]
    ) -> Session:
        """Return a plain SQLAlchemy session on the node where reference tables are written to.

        With ``wait=True`` COMMIT returns when all nodes that the cluster knows of have the change on disk,
        and so does the end of a block that commits; also if another node becomes the writer meanwhile.
        ``options`` go to :class:`sqlalchemy.orm.Session`. Rows are deleted by ``shardids reference delete``:
        the server refuses DELETE, TRUNCATE and changes of keys.

        Raises:
            ClusterConflict: the cluster has no reference tables.
            ConnectionFailed: the catalog cannot be reached, and was not asked since nodes or shards changed.

        The session's COMMIT raises:
            ReferencesBehind: ``wait=True``, and a node has not confirmed the change within ``within_s``
                seconds, or the writer was lost before all had. The change is committed there, and arrives
                when the node follows again.
        """
        node = self._references.writer()
        waiting = self._references.waiting(node, wait, within_s)
        return ReferenceSession(self._engines.of(node), **waiting, **options)

    def copy(self, table: Any, rows: Any, **options: Unpack[CopyOptions]) -> CopyReport:
        """Copy rows into their shards by COPY, over all nodes at once; return the number per shard.

        ``table`` is a ``Table`` or a mapped class. ``rows`` is an iterable of mappings, of named tuples, or
        of tuples whose ``columns`` are named; a polars ``DataFrame``; or an Arrow table or record batch
        (pyarrow). All rows have the same columns. IDs are reserved for rows without one; a column
        that the rows lack gets its default, in Python or on the server. Values are written as an INSERT would
        write them, except SQL expressions.

        The model determines a row's shard: by its sharding key, its ID, or foreign keys to either. Without
        these, ``key`` names the column to shard by, ``region`` the region of all keys, and ``id`` a column
        that holds IDs; ``shard`` is one for all rows. The columns that determine the shard agree in each row,
        and the named column is not NULL.

        Up to ``rows_a_transaction`` rows of a shard (50,000) are a transaction, and at most ten times as many
        are in memory. It is not one transaction: when it fails, each shard has the first of its rows, in the
        order given, or none. Before that, a transaction that meets a move is repeated on the new owner, with
        ``patience_s`` as in :meth:`shardids.Shard.run`. IDs that were reserved for rows that were not copied
        are lost.

        ``on_progress`` is called after each COMMIT with the :class:`shardids.client.copying.Copied` rows and
        IDs.

        Raises:
            BadArgument: the table or the columns do not fit. Nothing was copied.
            CopyFailed: the copy stopped; the error says where and why, and how many rows of each shard are
                committed.
        """
        from shardids.client.copying.copy import copy_rows  # noqa: PLC0415  # loaded by those who copy

        settings = self._copy_settings(options)
        return copy_rows(self, table, rows, settings, engine_of=self.engine)

    def _copy_settings(self, options: CopyOptions) -> CopySettings:
        from shardids.client.copying.copy import CopySettings  # noqa: PLC0415  # loaded by those who copy

        settings = CopySettings(**options)
        return settings if settings.shard is None else replace(settings, shard=self._checked(settings.shard))

    def _latest(self, after: After) -> int | None:
        """Return the latest of the IDs that a session's are to sort after; ``None`` if there are none.

        Raises:
            BadArgument: one is no ID of this cluster, or was issued before it.
        """
        given = after if isinstance(after, Iterable) else (after,)
        ids = [checked_integer("an ID", one, -1 << 63, (1 << 63) - 1) for one in given]
        for id_ in ids:
            self._checked(self.decode(id_).shard)
        return max(ids, default=None)

    def _checked(self, shard: int | None) -> int:
        number = shard if type(shard) is int else as_integer("a shard", shard)
        if not 0 <= number < self.shard_count and not self.placement.has(number, self.shard_count):
            raise no_shard(number, self.placement.total(self.shard_count))
        return number
