"""Looks for stored IDs of a shard that a range of ticks does not cover, though it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.catalog.skipped import Skipped
from shardids.ids.layout import Layout
from shardids.pg.queries import batches, prepare, read

_STATEMENT: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredId:
    """An ID in a table of a node."""

    node: str
    table: str
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column that may hold IDs of the shard: a row of ``clocks/columns.v1.sql``."""

    schema: str
    table_name: str
    column_name: str
    relation: str
    column: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    table: str
    id: int


def stored_outside(
    connection: Connection, node: str, layout: Layout, skipped: Skipped, starts_tick: int
) -> StoredId | None:
    """Return an ID of the shard that it would issue again: from its new start on, and not in the range."""
    last = (1 << (layout.time_bits + layout.sequence_bits)) - 1
    spans = [(starts_tick, skipped.first_tick - 1), (skipped.last_tick + 1, last)]
    condition = sql.SQL(" or ").join(
        _between(layout, skipped.shard, first, end) for first, end in spans if first <= end
    )
    if not condition.as_string():
        return None
    columns = read(connection, "clocks/columns.v1", _Column, of_shard=skipped.shard)
    for batch in batches(columns, _STATEMENT):
        if found := _first(connection, batch, condition, skipped.shard):
            return StoredId(node=node, table=found.table, id=found.id)
    return None


def _between(layout: Layout, shard: int, first: int, last: int) -> sql.Composable:
    """Return the condition that an ID is between two ticks. IDs may turn negative between them."""
    low, high = Skipped(shard=shard, first_tick=first, last_tick=last).ids(layout)
    span = "(id >= {} and id <= {})" if low <= high else "(id >= {} or id <= {})"
    return sql.SQL(span).format(sql.Literal(low), sql.Literal(high))


def _first(
    connection: Connection, columns: Sequence[_Column], condition: sql.Composable, shard: int
) -> _Row | None:
    one = sql.SQL(
        '(select {table} as "table", id from (select {column} as id from {relation}) t (id)'
        " where ({condition}) and shardids.shard_of(id) = {shard} order by id limit 1)"
    )
    selects = [
        one.format(
            table=sql.Literal(f"{column.relation}.{column.column}"),
            column=sql.SQL(column.column),
            relation=sql.SQL(column.relation),
            condition=condition,
            shard=sql.Literal(shard),
        )
        for column in columns
    ]
    with connection.begin():
        prepare(connection)
        query = sql.SQL(" union all ").join(selects).as_string()
        found = connection.execution_options(no_parameters=True).exec_driver_sql(query).first()
    return None if found is None else _Row(table=found[0], id=found[1])
