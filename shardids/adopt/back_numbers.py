"""The source's sequences, which go on past its own numbers when it takes over again.

Once that is decided, nobody takes writes until they are set: whatever could fail is tried before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from shardids.adopt.definitions import AS_IS
from shardids.adopt.sides import Sides
from shardids.errors import AdoptionFailed
from shardids.mover.requirements import Refusal


def sequences_are_fit(source: Connection, sides: Sides) -> Iterator[Refusal]:
    """Requires that the role may set the sequences of the source that number columns."""
    for row in _sequences(source, sides):
        if not row.is_settable:
            yield Refusal(
                reason=f"the role may not set sequence {row.sequence} of {row.table}.{row.column}",
                remedy=f"At the source: grant select, update on sequence {row.sequence} to …",
            )


def sequences_that_stay(source: Connection, sides: Sides) -> Iterator[str]:
    """Yields which sequences the way back leaves as they are: their numbers can't be told from the values."""
    for row in source.execute(_SEQUENCES, {"names": sides.names}):
        if not row.is_number:
            yield (
                f"adopt back leaves sequence {row.sequence} as it is: {row.table}.{row.column}, whose default"
                " draws from it, is no number"
            )


def try_sequences(sides: Sides) -> None:
    """Computes what the sequences would be set to, and sets nothing.

    Raises:
        AdoptionFailed: the role may not set one.
        StatementFailed: something else is in the way.
    """
    with sides.source.begin() as source:
        for row in _begun(source, sides):
            if not row.is_settable:
                raise AdoptionFailed(
                    f"the role may not set the source's sequence {row.sequence}",
                    hint=f"At the source: grant select, update on sequence {row.sequence} to …;"
                    " then shardids adopt back again.",
                )
            source.exec_driver_sql(f"select {_value(row, sides)}", execution_options=AS_IS)


def set_sequences(sides: Sides) -> None:
    """Lets the source's sequences go on past the furthest value of their columns that is not the cluster's.

    Idempotent as long as the source takes no writes.
    """
    with sides.source.begin() as source:
        for row in _begun(source, sides):
            source.exec_driver_sql(
                f"select setval({row.oid}::regclass, {_value(row, sides)})"  # noqa: S608 -- quoted
                f" where exists (select from {row.table} where {row.column} < {sides.lowest_new_id})",
                execution_options=AS_IS,
            )


def _begun(source: Connection, sides: Sides) -> Sequence[Row[Any]]:
    # A column without an index is read whole.
    source.execute(text("select set_config('statement_timeout', '0', true)"))
    return _sequences(source, sides)


def _sequences(source: Connection, sides: Sides) -> Sequence[Row[Any]]:
    return [row for row in source.execute(_SEQUENCES, {"names": sides.names}).all() if row.is_number]


def _value(row: Row[Any], sides: Sides) -> str:
    """Returns an expression for the number after which a sequence goes on, within its bounds."""
    further, nearer, furthest, whole = (
        ("greatest", -1, "max", "ceil") if row.is_rising else ("least", 1, "min", "floor")
    )
    drawn = f"coalesce(pg_sequence_last_value({row.oid}::regclass), {row.start}::numeric + {nearer})"
    old = f"from {row.table} where {row.column} < {sides.lowest_new_id}"
    found = f"(select {furthest}({row.column})::numeric {old})"
    return (
        f"cast({whole}(least(greatest({further}({drawn}, {found}), {row.lowest}), {row.highest})) as bigint)"
    )


_SEQUENCES = text("""
    select s.seqrelid::bigint as oid, s.seqrelid::regclass::text as sequence, s.seqstart as start,
           s.seqmin as lowest, s.seqmax as highest, s.seqincrement > 0 as is_rising,
           c.oid::regclass::text as table, quote_ident(a.attname) as column,
           has_sequence_privilege(s.seqrelid, 'update') and has_sequence_privilege(s.seqrelid, 'select')
             as is_settable,
           b.type = any (cast('{int2,int4,int8,numeric}' as regtype[])) as is_number
    from unnest(cast(:names as text[])) name
    join pg_class c on c.oid = to_regclass(name)
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    cross join lateral (
      with recursive base (type, of) as (
        select t.oid, t.typbasetype from pg_type t where t.oid = a.atttypid
        union all
        select t.oid, t.typbasetype from base join pg_type t on t.oid = base.of)
      select base.type from base where base.of = 0) b
    left join pg_attrdef e on e.adrelid = c.oid and e.adnum = a.attnum
    join pg_sequence s on exists (
      select from pg_depend d
      where d.classid = 'pg_class'::regclass and d.objid = s.seqrelid and d.deptype in ('a', 'i')
        and d.refclassid = 'pg_class'::regclass and d.refobjid = c.oid and d.refobjsubid = a.attnum
      union all
      select from pg_depend d
      where d.classid = 'pg_attrdef'::regclass and d.objid = e.oid
        and d.refclassid = 'pg_class'::regclass and d.refobjid = s.seqrelid)
    order by 1""")
