"""Samples rows, to see whether they are in the shard that their ID, or the hash of their key, names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from psycopg import sql
from sqlalchemy import Connection

from shardids.catalog.queries import batches, prepare, read, rows
from shardids.catalog.topology import schema_name, shard_for_key
from shardids.doctor.facts import KeyColumn, Sample
from shardids.errors import BadArgument

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
_HASHED: Final = frozenset({"smallint", "integer", "bigint", "text", "character varying", "bytea", "uuid"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column in one shard: a row of ``doctor/column.v1.sql``."""

    shard: int
    type: str
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    shard: int
    value: int | str | bytes


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


def sample_keys(
    connection: Connection, prefix: str, shard_count: int, keys: Sequence[ShardingKey]
) -> Iterator[Sample]:
    """Samples sharding keys at random.

    Raises:
        BadArgument: the column's type has no stable hash.
    """
    for key in keys:
        columns = read(
            connection,
            "doctor/column.v1",
            _Column,
            table_name=key.table_name,
            column_name=key.column_name,
        )
        for batch in batches(columns, _STATEMENT):
            yield from _sample_key(connection, prefix, shard_count, key, batch)


def _sample_key(
    connection: Connection, prefix: str, shard_count: int, key: ShardingKey, columns: Sequence[_Column]
) -> Iterator[Sample]:
    for column in columns:
        if column.type not in _HASHED:
            raise BadArgument(
                f"{key.table_name}.{key.column_name} is of type {column.type}, which has no stable hash",
                hint="A sharding key is an integer, text, bytea or uuid.",
            )
    selects = [
        sql.SQL("(select {} as shard, value from ({}) sampled (value) where value is not null)").format(
            sql.Literal(column.shard),
            _sampled(prefix, column.shard, key.table_name, key.column_name, column.pages),
        )
        for column in columns
    ]
    with connection.begin():
        prepare(connection)
        found = rows(connection, sql.SQL(" union all ").join(selects).as_string(), _Value)
    values: dict[int, list[int | str | bytes]] = {column.shard: [] for column in columns}
    for one in found:
        values[one.shard].append(one.value)
    for shard, there in values.items():
        elsewhere = [value for value in there if shard_for_key(value, shard_count) != shard]
        yield Sample(
            table_name=key.table_name,
            column_name=key.column_name,
            said_by="key",
            shard=shard,
            rows=len(there),
            wrong=len(elsewhere),
            example=repr(elsewhere[0]) if elsewhere else None,
            belongs_to=shard_for_key(elsewhere[0], shard_count) if elsewhere else None,
        )


def _sampled(prefix: str, shard: int, table: str, column: str, pages: int) -> sql.Composed:
    """Returns a query for some values of a column, from random pages."""
    return sql.SQL("select {} from {} tablesample system ({}) limit {}").format(
        sql.Identifier(column),
        sql.Identifier(schema_name(prefix, shard), table),
        sql.Literal(min(100.0, 100.0 * _PAGES / max(1, pages))),
        sql.Literal(_ROWS),
    )
