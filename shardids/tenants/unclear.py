"""Reasons to refuse the move of a key: values that may be its own or another's. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.catalog.keys.moved_ids import FIRST_MS
from shardids.ids.layout import Layout
from shardids.replication.subscriptions import Refusal
from shardids.tenants.family import COUNTERS, Choices, Family, Part, run

_NAMED: Final = 5


def unclear_ids(family: Family, source: Connection, layout: Layout) -> Iterator[Refusal]:
    """Yield columns whose values may be IDs of the key's rows, which are to be listed, or of others."""
    for part in family.parts:
        types = {column.name: column.builtin_type for column in part.columns}
        for column in part.unclear:
            if types.get(column) != "int8":
                yield Refusal(
                    reason=f"column {column} of table {part.name} draws IDs of the cluster and is not bigint:"
                    " they could not be listed, and would lead to the old shard",
                    remedy=f"alter table {part.name} alter column {column} type bigint",
                )
            elif count := run(source, _plausible(family, part, column, layout)).scalar_one():
                yield Refusal(
                    reason=f"column {column} of table {part.name} has {count} values that may be IDs of these"
                    " rows or of others: IDs of the key's rows are to lead to the new shard",
                    remedy="If they are of these, in every shard: alter table"
                    f" {part.name} alter column {column} set default SCHEMA.next_id(). If they are of others:"
                    f" a foreign key, or --refers {part.name}.{column}",
                )


def _plausible(family: Family, part: Part, column: str, layout: Layout) -> sql.Composed:
    bits = layout.shard_bits + layout.sequence_bits
    return sql.SQL(
        "select count(*) from {table} a where {owned} and (a.{column} < 0 or a.{column} >> {bits} >= {first})"
    ).format(
        table=sql.Identifier(family.schema, part.name),
        owned=family.owns(part, "a", family.schema),
        column=sql.Identifier(column),
        bits=sql.Literal(bits),
        first=sql.Literal(FIRST_MS),
    )


def unclear_counters(
    family: Family, connection: Connection, schema: str, choices: Choices
) -> Iterator[Refusal]:
    """Yield counters that may be the key's or another's; ``connection`` is to the shard with ``schema``.

    A counter is called after the key, or after the root's primary key.
    """
    if family.part(COUNTERS[0]) is None or family.anchor is None:
        return
    table, anchor, key = map(sql.Identifier, family.root_columns)
    names = {
        "root": sql.SQL("{}.{}").format(sql.Identifier(schema), table),
        "counters": sql.Identifier(schema, COUNTERS[0]),
        "anchor": anchor,
        "key": key,
    }
    both = {family.key, family.anchor}
    if len(both) > 1:
        query = sql.SQL(
            "select r.{anchor}::text || ' (' || r.{key}::text || ')' from {root} r"
            " where r.{anchor}::text <> {own} and (r.{anchor}::text = {text} or r.{key}::text = {own})"
            " limit 1"
        ).format(**names, own=sql.Literal(family.anchor), text=sql.Literal(family.key))
        if (other := run(connection, query).scalar_one_or_none()) is not None:
            yield Refusal(
                reason=f"counters called {_list(sorted(both))} may be those of key {family.key!r} or of row"
                f" {other} of {family.root} in schema {schema}",
                remedy="Move another key, or change that row's key.",
            )
    if schema != family.schema or COUNTERS[0] in choices.loose:
        return
    nobody = sql.SQL(
        "select distinct c.tenant from {counters} c where not exists (select from {root} r"
        " where c.tenant in (r.{anchor}::text, r.{key}::text)) order by 1 limit {most}"
    ).format(**names, most=sql.Literal(_NAMED))
    if others := run(connection, nobody).scalars().all():
        yield Refusal(
            reason=f"counters are called after no row of {family.root}, so whose they are is not known:"
            f" {_list(others)}",
            remedy=f"If none of them is the key's, let them stay: --loose {COUNTERS[0]}",
        )


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names))
