"""The shards of IDs that do not contain it: old IDs, issued before the cluster, and those of moved rows.

A shard that was found is remembered until a key is moved: only then does a row leave its shard. An old ID
without a row is looked for again each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Table, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper
from sqlalchemy.util import LRUCache

from shardids.catalog.keys.id_lists import Span
from shardids.catalog.keys.known import Departures, KnownHomes
from shardids.catalog.keys.moved_ids import list_of
from shardids.catalog.old_ids import chunk_of, read_chunks, read_list, shard_in
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import BY_DIRECTORY, BY_FAN_OUT, BY_KEY, OldIdRule, OldIdRules
from shardids.client.engines import NodeEngines
from shardids.client.placement import FollowedPlacement
from shardids.client.routing.models import Key, OldIds, ShardFinder, Tells, how_it_tells
from shardids.client.routing.models import MovedIds as LearnsIds
from shardids.errors import BadArgument, ClusterConflict, UnknownId
from shardids.ids.layout import Layout
from shardids.ids.text import as_integer
from shardids.pg.connections import in_child
from shardids.pg.queries import batches

_CHUNKS: Final = 2048
"""How many chunks of directories are remembered: at most 16 MiB."""
_FOUND: Final = 100_000
"""How many IDs are remembered whose shards the nodes were asked for."""
_CHUNKS_A_TIME: Final = 512
_SHARDS_A_TIME: Final = 256
"""How many shards one statement asks: it locks a table and an index in each."""


@dataclass(slots=True)
class _Remembered:
    rules: OldIdRules
    homes: int
    chunks: LRUCache[tuple[str, int], bytes] = field(default_factory=lambda: LRUCache(_CHUNKS))
    found: LRUCache[tuple[str, int], int] = field(default_factory=lambda: LRUCache(_FOUND))


class KnownOldIds:
    """A finder of the shards of old IDs by the rules of their tables: :attr:`shardids.Cluster.old_ids`."""

    def __init__(
        self,
        catalog: Catalog,
        followed: FollowedPlacement,
        engines: NodeEngines,
        *,
        shard_count: int,
        schema_of: Callable[[int], str],
    ) -> None:
        self._catalog = catalog
        self._followed = followed
        self._engines = engines
        self._shard_count = shard_count
        self._schema_of = schema_of
        self._remembered: _Remembered | None = None
        in_child(self, KnownOldIds._forget)

    def _forget(self) -> None:
        # Also in the child of a fork, where a thread that does not exist there may hold a cache's lock.
        self._remembered = None

    def close(self) -> None:
        """Close the connections to nodes."""
        self._engines.dispose()

    @property
    def rules(self) -> OldIdRules:
        """Which IDs are old, and the rule of each adopted table."""
        return self._known().rules

    def has(self, id_: int) -> bool:
        """Return whether an ID was issued before the cluster. Raises BadArgument if it is not an integer."""
        return self._known().rules.has(id_)

    def is_told(self, table: str | None) -> bool:
        """Return whether a table's old IDs find their shards without all shards being asked."""
        rule = self._known().rules.of_table.get(table or "")
        return rule is None or rule.rule != BY_FAN_OUT

    def shard_of(self, id_: int, table: str | None) -> int:
        """Return the shard of a table's row with an old ID.

        Raises:
            UnknownId: no row had it.
            BadArgument: the table is not named, or was not adopted.
        """
        number = as_integer("an ID", id_)
        shard = self.shards_of([number], table).get(number)
        if shard is None:
            raise UnknownId(
                f"no row of {table} has the ID {number}",
                hint="It is lower than all IDs of the cluster, so its row must be older than the adoption of"
                " the table. New rows get their IDs from their shard.",
            )
        return shard

    def shards_of(self, ids: Iterable[int], table: str | None) -> dict[int, int]:
        """Return the shards of old IDs, without those that no row had; ask for all that it does not know.

        Raises:
            BadArgument: the table is not named, or was not adopted.
            ClusterConflict: two shards have a row with an ID.
        """
        known = self._known()
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            return {}
        rule = _rule(known.rules, wanted[0], table)
        if rule.rule == BY_KEY:
            shards = self._followed.homes.shards_for(wanted, self._shard_count)
            return dict(zip(wanted, shards, strict=True))
        look = self._in_directory if rule.rule == BY_DIRECTORY else self._in_all_shards
        found = {id_: shard for id_ in wanted if (shard := _remembered(known, rule, id_)) is not None}
        missing = [id_ for id_ in wanted if id_ not in found]
        if not missing:
            return found
        what = f"the shards of old IDs of {rule.table} are asked for"
        return found | self._followed.asked(lambda: look(known, rule, missing), what)

    def _known(self) -> _Remembered:
        rules = self._followed.old_ids or OldIdRules(below=0, negative=False, of_table={})
        known = self._remembered
        homes = self._followed.homes.version
        if known is None or known.rules is not rules or known.homes != homes:
            self._remembered = known = _Remembered(rules, homes)
        return known

    def _in_directory(self, known: _Remembered, rule: OldIdRule, ids: Sequence[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        with self._catalog.engine.connect() as connection:
            for numbers in batches(sorted({chunk_of(id_) for id_ in ids}), _CHUNKS_A_TIME):
                chunks = read_chunks(connection, rule.table, numbers)
                for number, chunk in chunks.items():
                    known.chunks[rule.table, number] = chunk
                found |= {
                    id_: shard
                    for id_ in ids
                    if (shard := shard_in(chunks.get(chunk_of(id_), b""), id_)) is not None
                }
            if missing := [id_ for id_ in ids if id_ not in found]:
                listed = read_list(connection, rule.table, missing)
                for id_, shard in listed.items():
                    known.found[rule.table, id_] = shard
                found |= {id_: listed[id_] for id_ in missing if id_ in listed}
        return found

    def _in_all_shards(self, known: _Remembered, rule: OldIdRule, ids: Sequence[int]) -> dict[int, int]:
        try:
            found = dict(self._rows(rule, ids))
        except DBAPIError:
            # A shard that was moved meanwhile is not where the placement had it.
            if not self._followed.try_refresh():
                raise
            found = dict(self._rows(rule, ids))
        for id_, shard in found.items():
            known.found[rule.table, id_] = shard
        return found

    def _rows(self, rule: OldIdRule, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the IDs that rows have, with their shards; refuse two of one."""
        placement = self._followed.current
        seen: dict[int, int] = {}
        placement.require_settled()
        for name, shards in placement.by_node(placement.all_shards()).items():
            with self._engines.of(placement.nodes[name]).connect() as connection:
                self._followed.current.require_settled(since=placement)
                # Without parameters a % in a name is not a placeholder.
                asked = connection.execution_options(no_parameters=True)
                for some in batches(shards, _SHARDS_A_TIME):
                    for id_, shard in asked.exec_driver_sql(self._question(rule, some, ids)):
                        if seen.setdefault(id_, shard) != shard:
                            raise ClusterConflict(
                                f"{rule.table}: shards {seen[id_]} and {shard} both have a row with ID {id_}",
                                hint="Compare the two rows, and delete the wrong one.",
                            )
                        yield id_, shard
                    # Its locks end with it.
                    connection.rollback()

    def _question(self, rule: OldIdRule, shards: Collection[int], ids: Iterable[int]) -> str:
        one = sql.SQL("select {id}, {shard} from {table} where {id} = any((select ids from given)::bigint[])")
        given = sql.Literal("{" + ",".join(map(str, ids)) + "}")
        selects = [
            one.format(
                id=sql.Identifier(rule.column),
                shard=sql.Literal(shard),
                table=sql.Identifier(self._schema_of(shard), rule.table),
            )
            for shard in shards
        ]
        return (
            sql.SQL("with given (ids) as materialized (select {}::bigint[]) {}")
            .format(given, sql.SQL(" union all ").join(selects))
            .as_string()
        )


class WithinShard:
    """A finder of the shards of IDs for a session on one shard, which asks about the shard's own rows only.

    It assigns IDs that would be looked for in all shards to this one: the session finds no others.
    """

    def __init__(self, finder: ShardFinder, old_ids: KnownOldIds, shard: int) -> None:
        self._finder, self._old_ids, self._shard = finder, old_ids, shard

    @property
    def layout(self) -> Layout:
        """How IDs are split."""
        return self._finder.layout

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return self._finder.shard_count

    @property
    def old_ids(self) -> OldIds:
        """The finder of the shards of old IDs."""
        return self

    def has(self, id_: int) -> bool:
        """Return whether an ID is old."""
        return self._old_ids.has(id_)

    def shard_of(self, id_: int, *, of: str | None = None) -> int:
        """Return the shard of the row that has an ID."""
        if self._old_ids.is_told(of) or not self.has(id_):
            return self._finder.shard_of(id_, of=of)
        return self._shard

    def shards_of(self, ids: Iterable[int], table: str | None) -> Mapping[int, int]:
        """Return the shards of old IDs, without those that no row had."""
        if self._old_ids.is_told(table):
            return self._old_ids.shards_of(ids, table)
        return dict.fromkeys(ids, self._shard)

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """Return the shard of a sharding key."""
        return self._finder.shard_for(key, region=region)

    @property
    def homes(self) -> KnownHomes:
        """The directory of keys."""
        return self._finder.homes

    @property
    def moved_ids(self) -> LearnsIds | None:
        """The finder of the shards of rows that have left the one they were born in."""
        return self._finder.moved_ids


@dataclass(frozen=True, slots=True)
class _Spans:
    """Rows of a shard's list of moved IDs that were read, in order; immutable."""

    version: int
    firsts: Sequence[int] = ()
    spans: Sequence[Span] = ()

    def of(self, id_: int) -> Span | None:
        """Return the row that would have an ID; ``None`` if it was not read."""
        at = bisect_right(self.firsts, id_) - 1
        if at < 0:
            return None
        span = self.spans[at]
        return span if span.end is None or id_ < span.end else None

    def with_more(self, read: Iterable[Span]) -> _Spans:
        """Return these rows and others."""
        both = {span.first: span for span in (*self.spans, *read)}
        firsts = sorted(both)
        return _Spans(self.version, firsts, [both[first] for first in firsts])


class MovedIds:
    """A finder of the shards of rows that have left the shard they were born in, by their IDs.

    It asks the catalog about IDs of shards that a key's rows have left, up to the latest one; a row of the
    catalog's list answers for all IDs between its first and the next one's.
    """

    def __init__(self, catalog: Catalog, followed: FollowedPlacement) -> None:
        self._catalog = catalog
        self._followed = followed
        self._known: dict[int, _Spans] = {}

    def shard_of(self, id_: int, origin: int) -> int:
        """Return the shard of the row with an ID that was born in ``origin``.

        Raises:
            ConnectionFailed: the catalog would have to be asked, and can't be reached.
            MustBeAwaited: the same in an event loop's own code.
        """
        left = self._followed.homes.departures.get(origin)
        if left is None or not left.lowest <= id_ <= left.highest:
            return origin
        span = self._spans(origin, left).of(id_)
        if span is None:
            self._ask({origin: [id_]})
            span = self._spans(origin, left).of(id_)
        slot = None if span is None else span.number_of(id_)
        return left.shard_at(slot, origin)

    def learn(self, ids: Iterable[int], layout: Layout) -> None:
        """Ask for all of the IDs that the catalog would be asked for. Raises as :meth:`shard_of` does."""
        departures = self._followed.homes.departures
        if not departures:
            return
        wanted: dict[int, list[int]] = {}
        for id_ in ids:
            with suppress(BadArgument):
                origin = layout.shard_of(id_)
                left = departures.get(origin)
                if left and left.lowest <= id_ <= left.highest and not self._spans(origin, left).of(id_):
                    wanted.setdefault(origin, []).append(id_)
        if wanted:
            self._ask(wanted)

    def _spans(self, origin: int, left: Departures) -> _Spans:
        known = self._known.get(origin)
        if known is None or known.version != left.version:
            self._known[origin] = known = _Spans(left.version)
        return known

    def _ask(self, wanted: Mapping[int, Sequence[int]]) -> None:
        def ask() -> dict[int, list[Span]]:
            with self._catalog.engine.connect() as connection:
                return {origin: list_of(origin).spans(connection, ids) for origin, ids in wanted.items()}

        read = self._followed.asked(ask, "the shards of moved IDs are asked for")
        if sum(len(known.spans) for known in self._known.values()) > _CHUNKS:
            self._known.clear()
        for origin, spans in read.items():
            left = self._followed.homes.departures.get(origin)
            if left is not None:
                self._known[origin] = self._spans(origin, left).with_more(spans)


def how_ids_tell(of: Any) -> Tells | str | None:
    """Return how the IDs of a mapped class or a table determine the shard, or the table's name.

    Raises:
        BadArgument: it is not a mapped class, a table or a name.
    """
    if of is None or isinstance(of, str):
        return of
    if isinstance(of, Table):
        key: list[Any] = list(of.primary_key.columns)
        name = of.name
    else:
        mapper = inspect(of, raiseerr=False)
        if not isinstance(mapper, Mapper):
            raise BadArgument(f"of={of!r} is not a mapped class, a Table or the name of a table")
        key = list(mapper.primary_key)
        name = getattr(mapper.local_table, "name", str(mapper.local_table))
    told = [tells for column in key if (tells := how_it_tells(column)) is not None]
    return told[0] if told else name


def _remembered(known: _Remembered, rule: OldIdRule, id_: int) -> int | None:
    chunk = known.chunks.get((rule.table, chunk_of(id_))) if rule.rule == BY_DIRECTORY else None
    shard = None if chunk is None else shard_in(chunk, id_)
    return known.found.get((rule.table, id_)) if shard is None else shard


def _rule(rules: OldIdRules, id_: int, table: str | None) -> OldIdRule:
    adopted = ", ".join(sorted(rules.of_table))
    if table is None:
        raise BadArgument(
            f"ID {id_} was issued before this cluster, and rows of several tables may have it",
            hint=f"Name the table: of=User, or of='users'. Adopted tables: {adopted}.",
        )
    if table not in rules.of_table:
        raise BadArgument(
            f"ID {id_} was issued before this cluster, and {table} has no rule for such IDs",
            hint=f"Its rows have IDs of {rules.below} and above. Adopted tables: {adopted}.",
        )
    return rules.of_table[table]
