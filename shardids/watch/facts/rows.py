"""Readings of rows: whether they are in the shard that their ID, or the hash of their key, names."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeVar

from psycopg import sql
from sqlalchemy import Connection, MetaData

from shardids.catalog.keys.moved_ids import keys_of_ids
from shardids.catalog.old_ids import read_directory
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.skipped import IdSpan, Skipped
from shardids.catalog.topology import BY_DIRECTORY, BY_KEY, OldIdRule, OldIdRules, Placement, schema_name
from shardids.errors import BadArgument
from shardids.models.columns import SHARDING_KEY
from shardids.pg.queries import DROPPED_MEANWHILE, read
from shardids.pg.reader import Reader, Refused
from shardids.watch.facts.cluster import CounterFacts, KeyColumn, KindOfShard, Sample, Serial, ZoneOfTenant

_ROWS: Final = 100
"""Rows of one table in one shard."""
_PAGES: Final = 8
"""Pages that they are taken from, at random, if the table has more."""
_TABLES: Final = 500
"""Tables of all shards of one node, chosen at random if there are more."""
_INTEGERS: Final = frozenset({"smallint", "integer", "bigint"})
"""Of another type, the owner of that type may have made the cast that the sample would need."""
_BYTES: Final = {
    **dict.fromkeys(_INTEGERS, sql.SQL("convert_to('i:' || value, 'UTF8')")),
    "text": sql.SQL("convert_to('s:' || value, 'UTF8')"),
    "character varying": sql.SQL("convert_to('s:' || value, 'UTF8')"),
    "enum": sql.SQL("convert_to(format('s:%s', value), 'UTF8')"),
    "bytea": sql.SQL("'\\x623a'::bytea || value"),
    "uuid": sql.SQL("'\\x753a'::bytea || uuid_send(value)"),
}
"""The bytes of a key to hash, by its type: see :func:`shardids.catalog.topology.key_hash`."""
_KEYS: Final = {
    **dict.fromkeys(_INTEGERS, ("bigint", sql.SQL("raw::text"))),
    **dict.fromkeys(("text", "character varying", "enum"), ("text", sql.SQL("raw::text"))),
    "bytea": ("bytea", sql.SQL("encode(raw, 'hex')")),
    "uuid": ("uuid", sql.SQL("raw::text")),
}
"""A key's kind in the directory of keys, and its text there, by its type."""
_MISPLACED: Final = sql.SQL("""
    select {table} as table_name, {column} as column_name, 'key' as said_by, {shard} as shard,
           count(*) as rows, count(wrong) as wrong, (min(wrong))[1] as example,
           (min(wrong))[2]::integer as belongs_to
    from (
      select case when belongs_to <> {shard} then array[value, belongs_to::text] end
      from (
        select value, {belongs}
        from (
          select quote_literal(format('%s', value)) collate "C", value, {hash}
          from ({values}) read (value)
          where value is not null) hashed (value, raw, hash)) placed (value, belongs_to)) compared (wrong)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingKey:
    """A column whose hash determines the shard of a row."""

    table_name: str
    column_name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``users.name``.

        Raises:
            BadArgument: the text is not a table and a column.
        """
        table, _, column = text.partition(".")
        if not table or not column or "." in column:
            raise BadArgument(f"{text!r} is not a table and a column", hint="For example: --key users.name")
        return cls(table_name=table, column_name=column)


def keys_of(metadata: MetaData) -> list[ShardingKey]:
    """Return the sharding keys that models mark."""
    return [
        ShardingKey(table_name=table.name, column_name=column.name)
        for table in metadata.sorted_tables
        for column in table.columns
        if column.info.get(SHARDING_KEY)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column in one shard: a row of ``doctor/column.v1.sql``."""

    shard: int
    type: str
    is_enum: bool
    is_deterministic: bool
    pages: int
    refers_to: str | None
    referred: str | None

    @property
    def kind(self) -> str:
        return "enum" if self.is_enum else self.type


def sample_ids(
    description: Description,
    keys: Sequence[KeyColumn],
    adopted: Adopted,
    unread: Unread,
    *,
    skipped: Sequence[Skipped],
) -> Iterator[Sample]:
    """Sample IDs: some at random, and the newest, those apart that a wrong clock issued."""
    prefix = description.schema_prefix
    ranges = {
        shard: [one.ids(description.layout) for one in skipped if one.shard == shard]
        for shard in {one.shard for one in skipped}
    }
    tables = [
        (key, shard, pages)
        for key in keys
        if key.is_primary_key and key.filled_by == "own" and key.type in _INTEGERS
        for shard, pages in zip(key.shards, key.pages, strict=True)
    ]
    chosen = tables if len(tables) <= _TABLES else random.sample(tables, _TABLES)
    query = sql.SQL("""
        select {table} as table_name, {column} as column_name, 'id' as said_by, {shard} as shard,
               count(*) as rows, count(*) filter (where belongs_to <> {shard}) as wrong,
               (min(id) filter (where belongs_to <> {shard}))::text as example,
               (array_agg(belongs_to order by id) filter (where belongs_to <> {shard}))[1] as belongs_to,
               array_agg(array[id::bigint, belongs_to::bigint] order by id)
                 filter (where belongs_to <> {shard} and {has_homes}) as strangers,
               max(id) filter (where belongs_to = {shard} and {usual}) as newest
        from (
          select id, {belongs}
          from (({sampled}) union (select {id} from {relation} order by 1 desc limit {limit})
               {before}) read (id)
        ) sampled (id, belongs_to)""")

    def query_of(one: tuple[KeyColumn, int, int]) -> str:
        key, shard, pages = one
        return query.format(
            table=sql.Literal(key.table_name),
            column=sql.Literal(key.column_name),
            shard=sql.Literal(shard),
            sampled=_sampled(prefix, shard, key.table_name, key.column_name, pages),
            id=sql.Identifier(key.column_name),
            relation=sql.Identifier(schema_name(prefix, shard), key.table_name),
            limit=sql.Literal(_ROWS),
            has_homes=sql.Literal(adopted.has_homes),
            usual=_usual(ranges.get(shard, ())),
            before=_before(prefix, key, shard, ranges.get(shard, ())),
            belongs=adopted.belongs(adopted.rule(key.table_name, key.column_name), sql.SQL("id")),
        ).as_string()

    for _, found in unread.read(chosen, _table_and_shard, query_of):
        yield from (_without_moved(row, adopted) for row in found)
    by_directory = [one for one in chosen if adopted.is_by_directory(one[0].table_name, one[0].column_name)]
    yield from _in_directory(prefix, by_directory, adopted=adopted, unread=unread)


def _without_moved(row: dict[str, Any], adopted: Adopted) -> Sample:
    """Return a sample without the IDs whose rows came here with their key."""
    strangers: dict[int, int] = dict(row.pop("strangers") or ())
    sample = Sample(**row)
    if not strangers:
        return sample
    moved = adopted.moved(list(strangers))
    wrong = [id_ for id_ in strangers if moved.get(id_) != sample.shard]
    example = wrong[0] if wrong else None
    return replace(
        sample,
        wrong=len(wrong),
        example=None if example is None else str(example),
        belongs_to=None if example is None else strangers[example],
    )


def read_serials(connection: Connection, prefix: str, unread: Unread) -> list[Serial]:
    """Read the highest values of columns that sequences fill, and then how far these have come."""
    found = read(connection, "doctor/serials.v1", Serial)
    chosen = found if len(found) <= _TABLES else random.sample(found, _TABLES)

    def query_of(one: Serial) -> str:
        column = sql.Identifier(one.column_name)
        return (
            sql.SQL("select max({column})::bigint as highest from {table}")
            .format(column=column, table=sql.Identifier(schema_name(prefix, one.shard), one.table_name))
            .as_string()
        )

    highest = {
        (one.shard, one.sequence_name, one.table_name, one.column_name): rows[0]["highest"]
        for one, rows in unread.read(chosen, lambda one: (one.table_name, one.shard), query_of)
    }
    later = read(connection, "doctor/serials.v1", Serial) if highest else []
    return [
        replace(one, highest=highest[key])
        for one in later
        if (key := (one.shard, one.sequence_name, one.table_name, one.column_name)) in highest
    ]


def _table_and_shard(one: tuple[KeyColumn, int, int]) -> tuple[str, int]:
    return one[0].table_name, one[1]


def _usual(ranges: Sequence[IdSpan]) -> sql.Composable:
    """Return the condition that an ID was not issued by a wrong clock."""
    outside = [
        sql.SQL("id not between {} and {}").format(sql.Literal(first), sql.Literal(last))
        for first, last in ranges
    ]
    return sql.SQL(" and ").join(outside) if outside else sql.SQL("true")


def _before(prefix: str, key: KeyColumn, shard: int, ranges: Sequence[IdSpan]) -> sql.Composable:
    """Return a query of the newest IDs below those of a wrong clock, to be added to others."""
    if not ranges:
        return sql.SQL("")
    return sql.SQL(
        "union (select {id} from {relation} where {id} < {first} order by 1 desc limit {limit})"
    ).format(
        id=sql.Identifier(key.column_name),
        relation=sql.Identifier(schema_name(prefix, shard), key.table_name),
        first=sql.Literal(min(first for first, _ in ranges)),
        limit=sql.Literal(_ROWS),
    )


def _in_directory(
    prefix: str,
    tables: Sequence[tuple[KeyColumn, int, int]],
    *,
    adopted: Adopted,
    unread: Unread,
) -> Iterator[Sample]:
    """Compare old IDs with their tables' directories, which the node does not have."""

    def query_of(one: tuple[KeyColumn, int, int]) -> str:
        key, shard, pages = one
        return (
            sql.SQL("select id from ({}) read (id) where {} order by id")
            .format(
                _sampled(prefix, shard, key.table_name, key.column_name, pages), adopted.is_old(sql.SQL("id"))
            )
            .as_string()
        )

    for (key, shard, _), found in unread.read(tables, _table_and_shard, query_of):
        said = adopted.in_directory(key.table_name, [row["id"] for row in found])
        wrong = [id_ for id_, says in said.items() if says != shard]
        yield Sample(
            table_name=key.table_name,
            column_name=key.column_name,
            said_by="id",
            shard=shard,
            rows=len(said),
            wrong=len(wrong),
            example=str(wrong[0]) if wrong else None,
            belongs_to=said[wrong[0]] if wrong else None,
        )


def read_keys(
    connection: Connection,
    prefix: str,
    keys: Sequence[ShardingKey],
    adopted: Adopted,
    *,
    regions: Collection[Region],
    every_row: bool,
    unread: Unread,
) -> Iterator[Sample]:
    """Read sharding keys, some at random or all, and hashes them on the node.

    In a shard of a region, a row may be there by the hash over the region's shards or over all.

    Raises:
        BadArgument: the column's type or collation has no hash that equal values share.
    """
    for key in keys:
        columns = read(
            connection,
            "doctor/column.v1",
            _Column,
            table_name=key.table_name,
            column_name=key.column_name,
        )
        for column in columns:
            _require_hash(key, column)

        def query_of(column: _Column, key: ShardingKey = key) -> str:
            by_hash = _by_hash(column, adopted, regions)
            return _misplaced(
                prefix, key, column, adopted=adopted, by_hash=by_hash, every_row=every_row
            ).as_string()

        def table_of(column: _Column, table: str = key.table_name) -> tuple[str, int]:
            return table, column.shard

        timeout = "0" if every_row else None
        for _, found in unread.read(columns, table_of, query_of, statement_timeout=timeout):
            yield from (Sample(**row) for row in found)


def _require_hash(key: ShardingKey, column: _Column) -> None:
    what = f"{key.table_name}.{key.column_name}"
    if column.kind not in _BYTES:
        raise BadArgument(
            f"{what} is of type {column.type}, which has no stable hash",
            hint="A sharding key is an integer, text, an enum, bytea or uuid.",
        )
    if not column.is_deterministic:
        raise BadArgument(
            f"{what} has a nondeterministic collation: equal values have several hashes",
            hint="A sharding key is text of a deterministic collation.",
        )


def _by_hash(column: _Column, adopted: Adopted, regions: Collection[Region]) -> sql.Composed:
    """Return the shard that a row of the column's shard belongs to, by the node's directory or ``hash``."""
    everywhere: sql.Composed = MODULO.format(hash=sql.SQL("hash"), shards=sql.Literal(adopted.shard_count))
    region_names = [region.name for region in regions if column.shard in region.shards]
    if adopted.has_homes:
        kind, key = _KEYS[column.kind]
        kinds = [kind, *(f"{kind}@{name}" for name in region_names)]
        everywhere = sql.SQL(
            "coalesce((select h.shard from shardids.key_home h where h.kind = any ({}) and h.key = {}"
            " order by h.shard <> {} limit 1), {})"
        ).format(sql.Literal(kinds), key, sql.Literal(column.shard), everywhere)
    for region in regions:
        if column.shard in region.shards:
            own = MODULO.format(hash=sql.SQL("hash"), shards=sql.Literal(len(region.shards)))
            return sql.SQL("case when {} + {} = {} then {} else {} end").format(
                sql.Literal(region.first_shard),
                own,
                sql.Literal(column.shard),
                sql.Literal(column.shard),
                everywhere,
            )
    return everywhere


def _misplaced(
    prefix: str,
    key: ShardingKey,
    column: _Column,
    *,
    adopted: Adopted,
    by_hash: sql.Composed,
    every_row: bool,
) -> sql.Composed:
    """Return a query that counts the rows of a shard whose keys belong to others."""
    if every_row:
        values = sql.SQL("select {} from {}").format(
            sql.Identifier(key.column_name),
            sql.Identifier(schema_name(prefix, column.shard), key.table_name),
        )
    else:
        values = _sampled(prefix, column.shard, key.table_name, key.column_name, column.pages)
    # An ID, or what refers to one, is hashed only if it is old.
    rule = adopted.rule(key.table_name, key.column_name) or adopted.rule(
        column.refers_to or "", column.referred or ""
    )
    is_id = rule is not None and column.kind in _INTEGERS
    return _MISPLACED.format(
        table=sql.Literal(key.table_name),
        column=sql.Literal(key.column_name),
        shard=sql.Literal(column.shard),
        belongs=adopted.belongs(rule, sql.SQL("raw")) if is_id else by_hash,
        hash=HASH.format(bytes=_BYTES[column.kind]),
        values=values,
    )


def _sampled(prefix: str, shard: int, table: str, column: str, pages: int) -> sql.Composed:
    """Return a query for some values of a column, from random pages."""
    return sql.SQL("select {} from {} tablesample system ({}) limit {}").format(
        sql.Identifier(column),
        sql.Identifier(schema_name(prefix, shard), table),
        sql.Literal(min(100.0, 100.0 * _PAGES / max(1, pages))),
        sql.Literal(_ROWS),
    )


KINDS: Final = "shardids_counter_kind"
ZONES: Final = "shardids_counter_zone"


def read_counters(
    kinds: Sequence[tuple[int, str]], zones: Sequence[tuple[int, str]], unread: Unread
) -> CounterFacts:
    """Read them from shards, given with their schemas, that have the tables and let them be read."""

    def rows_of(table: str, columns: str, shards: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        def query_of(one: tuple[int, str]) -> str:
            return (
                sql.SQL("select {}::integer as shard, {} from {}")
                .format(sql.Literal(one[0]), sql.SQL(columns), sql.Identifier(one[1], table))
                .as_string()
            )

        for _, found in unread.read(shards, lambda one: (table, one[0]), query_of):
            yield from found

    return CounterFacts(
        kinds=tuple(
            KindOfShard(**row)
            for row in rows_of(KINDS, "kind, per, zone, prefix, padding, lanes, keep_days", kinds)
        ),
        zones=tuple(ZoneOfTenant(**row) for row in rows_of(ZONES, "tenant, zone", zones)),
    )


Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Unread:
    """A reader of a node's tables, which records those that were left out: by name and shard, the reason.

    ``retries``: an answer that a table was dropped raises, for the node to be asked again.
    """

    def __init__(self, reader: Reader, *, retries: bool) -> None:
        self.reader = reader
        self.tables: dict[tuple[str, int], str] = {}
        self._retries = retries

    def read(
        self,
        items: Sequence[Item],
        table_of: Callable[[Item], tuple[str, int]],
        query_of: Callable[[Item], str],
        *,
        statement_timeout: str | None = None,
    ) -> Iterator[tuple[Item, list[dict[str, Any]]]]:
        """Yield the items whose tables could be read, with the rows of their queries; note the others.

        ``table_of`` returns an item's table and shard.
        """
        answers = self.reader.read([query_of(item) for item in items], statement_timeout=statement_timeout)
        for item, answer in zip(items, answers, strict=True):
            found = self.noted(*table_of(item), answer)
            if found is not None:
                yield item, found

    def noted(self, table: str, shard: int, answer: Answer | Refused) -> Answer | None:
        """Return the answer for a table; if it was refused, note the reason and return ``None``."""
        if not isinstance(answer, Refused):
            return answer
        if self._retries and answer.sqlstate in DROPPED_MEANWHILE:
            raise self.reader.error(answer, f"{table} of shard {shard}")
        self.tables[table, shard] = answer.reason
        return None


HASH: Final = sql.SQL("('x' || encode(substr(sha256({bytes}), 1, 8), 'hex'))::bit(64)::bigint")
"""The signed reading of a key's hash."""
MODULO: Final = sql.SQL("mod({hash} + case when {hash} < 0 then 18446744073709551616 else 0 end, {shards})")
"""The shard of a key's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The rules of a cluster's old IDs, if it has any, and of keys that moved.

    ``directory`` reads chunks of a table's directory of old IDs. ``has_homes``: there is a directory of keys.
    ``moved`` returns the shards of rows that have left the shard that they were born in, by their IDs.
    """

    rules: OldIdRules | None
    shard_count: int
    directory: Callable[[str, Sequence[int]], Mapping[int, int]]
    has_homes: bool
    moved: Callable[[Sequence[int]], Mapping[int, int]]

    def rule(self, table: str, column: str) -> OldIdRule | None:
        """Return the rule of a table's ID column."""
        found = None if self.rules is None else self.rules.of_table.get(table)
        return found if found is not None and found.column == column else None

    def is_by_directory(self, table: str, column: str) -> bool:
        """Return whether the column's old IDs are in a directory."""
        rule = self.rule(table, column)
        return rule is not None and rule.rule == BY_DIRECTORY

    def is_old(self, value: sql.Composable) -> sql.Composed:
        """Return a condition that an integer is an old ID."""
        assert self.rules is not None  # noqa: S101 -- there is a rule
        lowest = sql.SQL("") if self.rules.negative else sql.SQL("{} >= 0 and ").format(value)
        return sql.SQL("({}{} < {})").format(lowest, value, sql.Literal(self.rules.below))

    def belongs(self, rule: OldIdRule | None, value: sql.Composable) -> sql.Composed:
        """Return an expression for the shard that an ID says; NULL where SQL can't tell."""
        new = sql.SQL("shardids.shard_of({})").format(value)
        if rule is None:
            return new
        old: sql.Composable = sql.SQL("null")
        if rule.rule == BY_KEY:
            bytes_ = sql.SQL("convert_to('i:' || {}, 'UTF8')").format(value)
            old = MODULO.format(hash=HASH.format(bytes=bytes_), shards=sql.Literal(self.shard_count))
        return sql.SQL("case when {} then {} else {} end::integer").format(self.is_old(value), old, new)

    def in_directory(self, table: str, ids: Sequence[int]) -> dict[int, int | None]:
        """Return the shards that a table's directory has for old IDs."""
        found = self.directory(table, ids)
        return {id_: found.get(id_) for id_ in ids}


def adopted_in(catalog: Catalog, placement: Placement, shard_count: int) -> Adopted:
    """Return the rules, and how to read directories in the catalog."""

    def moved(ids: Sequence[int]) -> Mapping[int, int]:
        with catalog.engine.connect() as connection:
            return {id_: key.shard for id_, key in keys_of_ids(connection, ids).items()}

    def directory(table: str, ids: Sequence[int]) -> Mapping[int, int]:
        with catalog.engine.connect() as connection:
            return read_directory(connection, table, ids)

    return Adopted(
        rules=placement.old_ids,
        shard_count=shard_count,
        directory=directory,
        has_homes=placement.homes_version > 0,
        moved=moved,
    )
