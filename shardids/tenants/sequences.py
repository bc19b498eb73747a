"""Sequences of the application that number a key's rows: the target's go on after the values that arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.replication.subscriptions import Refusal
from shardids.tenants.family import Family, run

_AHEAD: Final = 10_000
"""How many values are left out: others draw while a sequence is set, and it must not go back for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A sequence that a column has its values from; ``name`` as SQL writes it, with the schema."""

    table: str
    column: str
    name: str
    start: int
    increment: int
    lowest: int
    highest: int

    def is_like(self, other: _Sequence) -> bool:
        """Return whether both give the same values when they are new."""
        return (self.start, self.increment, self.lowest, self.highest) == (
            other.start,
            other.increment,
            other.lowest,
            other.highest,
        )

    def is_apart(self, other: _Sequence) -> bool:
        """Return whether they never give the same value."""
        if self.increment == other.increment and (self.start - other.start) % self.increment:
            return True
        return self.highest < other.lowest or other.highest < self.lowest


def sequences_apart(family: Family, source: Connection, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require that both shards' sequences of a column begin alike, or never give the same value."""
    here = _read(target, schema)
    for place, one in _read(source, family.schema).items():
        other = here.get(place)
        if (
            other is not None
            and family.part(one.table)
            and not one.is_like(other)
            and not one.is_apart(other)
        ):
            yield Refusal(
                reason=f"sequences {one.name} and {other.name} of column {one.column} of table {one.table}"
                " begin apart, and could give the same values one day",
                remedy="alter sequence … start …: the same for both; or for each a minvalue and a maxvalue"
                " that the other never reaches.",
            )


def advance(family: Family, source: Connection, target: Connection, schema: str, *, reads_rows: bool) -> None:
    """Let the target's sequences go on after those of the source, and with ``reads_rows`` after its rows.

    ``target`` is the transaction that sees these. A sequence stays advanced if that is rolled back.
    """
    there = _read(source, family.schema)
    for place, one in _read(target, schema).items():
        part, other = family.part(one.table), there.get(place)
        if part is None or (other is not None and not one.is_like(other)):
            continue
        last = []
        if other is not None:
            query = sql.SQL("select last_value from {}").format(sql.SQL(other.name))
            last.append(run(source, query).scalar_one())
        if reads_rows:
            farthest = sql.SQL("select {}(a.{})::bigint from {} a where {}").format(
                sql.SQL("max" if one.increment > 0 else "min"),
                sql.Identifier(one.column),
                sql.Identifier(schema, part.name),
                family.owns(part, "a", schema),
            )
            last.append(run(target, farthest).scalar_one())
        values = [value for value in last if value is not None and one.lowest <= value <= one.highest]
        if not values:
            continue
        value = max(values) if one.increment > 0 else min(values)
        beyond = value + _AHEAD * one.increment
        new = beyond if one.lowest <= beyond <= one.highest else value
        sets = sql.SQL("select setval({}, {}) from {} s where s.last_value {} {}").format(
            sql.Literal(one.name),
            sql.Literal(new),
            sql.SQL(one.name),
            sql.SQL("<=" if one.increment > 0 else ">="),
            sql.Literal(value),
        )
        run(target, sets)


def _read(connection: Connection, schema: str) -> dict[tuple[str, str], _Sequence]:
    found = (_Sequence(**row._mapping) for row in connection.execute(_SEQUENCES, {"schema": schema}))
    return {(one.table, one.column): one for one in found}


# Of serial columns and of other defaults that name a sequence; then those of identity columns.
_SEQUENCES: Final = text("""
    select c.relname::text as "table", a.attname::text as "column", s.oid::regclass::text as name,
           q.seqstart as start, q.seqincrement as increment, q.seqmin as lowest, q.seqmax as highest
    from (select f.adrelid as relation, f.adnum as number, d.refobjid as sequence
          from pg_attrdef f join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid
          where d.refclassid = 'pg_class'::regclass
          union all
          select d.refobjid, d.refobjsubid, d.objid from pg_depend d
          where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass
            and d.deptype = 'i') u
    join pg_sequence q on q.seqrelid = u.sequence
    join pg_class s on s.oid = u.sequence
    join pg_class c on c.oid = u.relation
    join pg_attribute a on a.attrelid = u.relation and a.attnum = u.number
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'
      and s.relname not in ('id_counter', 'id_offset')""")
