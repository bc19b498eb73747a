"""How the rows of a source would be spread over shards: rows a shard, the largest keys, and growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.adopt.inventory import Column, Inventory, Table
from shardids.adopt.paths import Sorted, Way
from shardids.adopt.source import Source
from shardids.adopt.statements import Joins, is_sampled, named, only_row, sampled, unreadable
from shardids.errors import MissingPrivilege, StatementFailed

_CREATED: Final = frozenset(
    [
        *("created_at", "created", "created_on", "createdat", "creation_date", "date_created"),
        *("inserted_at", "added_at", "placed_at"),
    ]
)
"""Columns that tell when a row was made."""
_RECENT_DAYS: Final = 30
LARGEST_KEYS: Final = 5
"""How many keys of a table are named as those with the most rows."""

_HASHED_BYTES: Final = {
    "integer": "convert_to('i:' || key, 'UTF8')",
    "text": "convert_to('s:' || key, 'UTF8')",
    "uuid": r"'\x753a'::bytea || uuid_send(key)",
}
"""The bytes that ``key_hash`` hashes, by the family of the key's type."""
_STATEMENT: Final = """
with read as materialized (select {key} as key, {created} as created from {table} t0{part}{joins}),
     grouped as (select key, count(*) as n from read where key is not null group by key),
     hashed as (
       select ('x' || encode(substr(sha256({bytes}), 1, 8), 'hex'))::bit(64)::bigint as h, n from grouped),
     placed as (
       select mod(h::numeric + case when h < 0 then 18446744073709551616 else 0 end, {shards}) as shard, n
       from hashed)
select (select count(*) from read),
       (select count(*) from read where created > now() - make_interval(days => {days}) and created <= now()),
       (select least({days}, greatest(1, extract(epoch from now() - min(created)) / 86400))::float8
        from read where isfinite(created) having count(*) > 0),
       (select json_object_agg(shard, n) from (
          select shard, sum(n) as n from placed group by shard) as by_shard),
       (select json_agg(json_build_array(key::text, n)) from (
          select key, n from grouped order by n desc, key limit {largest}) as most)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the rows of a table are spread, from those that were read.

    ``is_exact``: all rows were read. ``shards``: rows by shard. ``largest``: the keys with the most rows, as
    text. ``rows_a_day``: how many rows were created a day lately; None if no column tells.
    """

    rows: int
    is_exact: bool
    shards: Mapping[int, int]
    largest: Sequence[tuple[str, int]]
    rows_a_day: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads how rows are spread."""

    source: Source
    inventory: Inventory
    sorted: Sorted
    sample_rows: int

    def read(self, name: str, shard_count: int) -> Spread | None:
        """Returns how the rows of a table are spread; None if they can't be read, or there are none."""
        table, way = self.inventory.tables[name], self.sorted.ways[name]
        column = key_column(self.inventory, self.sorted, name)
        if not table.heap_bytes or column.family is None or unreadable(self.inventory, self.sorted, name):
            return None
        try:
            with self.source.rows() as connection:
                return self._read(connection, table, way, str(column.family), shard_count)
        except (StatementFailed, MissingPrivilege):
            return None

    def _read(
        self, connection: Connection, table: Table, way: Way, family: str, shard_count: int
    ) -> Spread | None:
        joins = Joins()
        key = joins.key_of(way)
        created = next((one for one in table.columns.values() if _is_created(one)), None)
        when = (
            sql.SQL("t0.{}::timestamptz").format(sql.Identifier(created.name))
            if created
            else sql.SQL("null::timestamptz")
        )
        count, recent, days, shards, largest = only_row(
            connection,
            sql.SQL(_STATEMENT).format(
                key=key,
                created=when,
                table=named(table.sql),
                part=sampled(table, self.sample_rows),
                joins=joins.text(),
                bytes=sql.SQL(_HASHED_BYTES[family]),
                shards=sql.Literal(shard_count),
                days=sql.Literal(_RECENT_DAYS),
                largest=sql.Literal(LARGEST_KEYS),
            ),
        )
        if not count:
            return None
        is_exact = not is_sampled(table, self.sample_rows)
        scale = 1.0 if is_exact else table.rows / count
        return Spread(
            rows=count,
            is_exact=is_exact,
            shards={int(shard): int(found) for shard, found in (shards or {}).items()},
            largest=[(text, found) for text, found in largest or ()],
            rows_a_day=None if created is None or days is None else recent * scale / days,
        )


def key_column(inventory: Inventory, sorted_: Sorted, name: str) -> Column:
    """Returns the column that holds the key of a table's rows, in the table or at the end of its path."""
    way = sorted_.ways[name]
    holder = way.path[-1].referenced_table if way.path else name
    return inventory.tables[holder].columns[way.key]


def _is_created(column: Column) -> bool:
    is_time = column.builtin_type in ("timestamp", "timestamptz", "date")
    return is_time and column.name.lower() in _CREATED
