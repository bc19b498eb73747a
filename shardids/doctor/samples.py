"""Reads rows, to see whether they are in the shard that their ID, or the hash of their key, names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from psycopg import sql
from sqlalchemy import Connection, MetaData

from shardids.catalog.queries import batches, prepare, read, rows
from shardids.catalog.topology import schema_name
from shardids.doctor.facts import KeyColumn, Sample
from shardids.errors import BadArgument
from shardids.models.columns import SHARDING_KEY

_ROWS: Final = 100
"""Rows of one table in one shard."""
_PAGES: Final = 8
"""Pages that they are taken from, at random, if the table has more."""
_TABLES: Final = 500
"""Tables of all shards of one node, chosen at random if there are more."""
_STATEMENT: Final = 50
"""Tables that one statement samples: planning grows with their number, faster than that."""
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
"""What is hashed of a key, by its type: see :func:`shardids.catalog.topology.key_hash`."""
_MISPLACED: Final = sql.SQL("""
    select {table} as table_name, {column} as column_name, 'key' as said_by, {shard} as shard,
           count(*) as rows, count(wrong) as wrong, (min(wrong))[1] as example,
           (min(wrong))[2]::integer as belongs_to
    from (
      select case when belongs_to <> {shard} then array[value, belongs_to::text] end
      from (
        select value, mod(hash + case when hash < 0 then 18446744073709551616 else 0 end, {shards})
        from (
          select quote_literal(format('%s', value)) collate "C",
                 ('x' || encode(substr(sha256({bytes}), 1, 8), 'hex'))::bit(64)::bigint
          from ({values}) read (value)
          where value is not null) hashed (value, hash)) placed (value, belongs_to)) compared (wrong)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingKey:
    """A column whose hash decides in which shard a row belongs."""

    table_name: str
    column_name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``users.name``.

        Raises:
            BadArgument: the text is not a table and a column.
        """
        table, _, column = text.partition(".")
        if not table or not column or "." in column:
            raise BadArgument(f"{text!r} is not a table and a column", hint="For example: --key users.name")
        return cls(table_name=table, column_name=column)


def keys_of(metadata: MetaData) -> list[ShardingKey]:
    """Returns the sharding keys that models mark."""
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

    @property
    def kind(self) -> str:
        return "enum" if self.is_enum else self.type


def sample_ids(connection: Connection, prefix: str, keys: Sequence[KeyColumn]) -> Iterator[Sample]:
    """Samples IDs: some at random, and the newest."""
    tables = [
        (key, shard, pages)
        for key in keys
        if key.is_primary_key and key.filled_by == "own" and key.is_readable and key.type in _INTEGERS
        for shard, pages in zip(key.shards, key.pages, strict=True)
    ]
    chosen = tables if len(tables) <= _TABLES else random.sample(tables, _TABLES)
    query = sql.SQL("""
        select {table} as table_name, {column} as column_name, 'id' as said_by, {shard} as shard,
               count(*) as rows, count(*) filter (where shardids.shard_of(id) <> {shard}) as wrong,
               (min(id) filter (where shardids.shard_of(id) <> {shard}))::text as example,
               shardids.shard_of(min(id) filter (where shardids.shard_of(id) <> {shard})) as belongs_to,
               max(id) filter (where shardids.shard_of(id) = {shard}) as newest
        from (({sampled}) union (select {id} from {relation} order by 1 desc limit {limit})) sampled (id)""")
    for batch in batches(chosen, _STATEMENT):
        selects = [
            query.format(
                table=sql.Literal(key.table_name),
                column=sql.Literal(key.column_name),
                shard=sql.Literal(shard),
                sampled=_sampled(prefix, shard, key.table_name, key.column_name, pages),
                id=sql.Identifier(key.column_name),
                relation=sql.Identifier(schema_name(prefix, shard), key.table_name),
                limit=sql.Literal(_ROWS),
            )
            for key, shard, pages in batch
        ]
        with connection.begin():
            prepare(connection)
            yield from rows(connection, sql.SQL(" union all ").join(selects).as_string(), Sample)


def read_keys(
    connection: Connection,
    prefix: str,
    shard_count: int,
    keys: Sequence[ShardingKey],
    *,
    every_row: bool,
) -> Iterator[Sample]:
    """Reads sharding keys, some at random or all, and hashes them on the node.

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
        for batch in batches(columns, _STATEMENT):
            selects = [_misplaced(prefix, shard_count, key, column, every_row=every_row) for column in batch]
            with connection.begin():
                prepare(connection)
                if every_row:
                    connection.exec_driver_sql("set local statement_timeout = 0")
                yield from rows(connection, sql.SQL(" union all ").join(selects).as_string(), Sample)


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


def _misplaced(
    prefix: str, shard_count: int, key: ShardingKey, column: _Column, *, every_row: bool
) -> sql.Composed:
    """Returns a query that counts the rows of a shard whose keys belong to others."""
    if every_row:
        values = sql.SQL("select {} from {}").format(
            sql.Identifier(key.column_name),
            sql.Identifier(schema_name(prefix, column.shard), key.table_name),
        )
    else:
        values = _sampled(prefix, column.shard, key.table_name, key.column_name, column.pages)
    return _MISPLACED.format(
        table=sql.Literal(key.table_name),
        column=sql.Literal(key.column_name),
        shard=sql.Literal(column.shard),
        shards=sql.Literal(shard_count),
        bytes=_BYTES[column.kind],
        values=values,
    )


def _sampled(prefix: str, shard: int, table: str, column: str, pages: int) -> sql.Composed:
    """Returns a query for some values of a column, from random pages."""
    return sql.SQL("select {} from {} tablesample system ({}) limit {}").format(
        sql.Identifier(column),
        sql.Identifier(schema_name(prefix, shard), table),
        sql.Literal(min(100.0, 100.0 * _PAGES / max(1, pages))),
        sql.Literal(_ROWS),
    )
