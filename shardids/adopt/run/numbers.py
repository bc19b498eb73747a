"""Numbers that columns draw from sequences: the shards go on after the source, and the source after its own.

A sequence of a shard knows nothing of the others: two shards draw the same number. What is kept is that no
shard draws one that the source has drawn. When the source takes over again, nobody takes writes until its
sequences are set: whatever could fail is tried before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from shardids.adopt.run.sides import Sides, Taker
from shardids.errors import AdoptionFailed
from shardids.pg.definitions import Definition
from shardids.pg.queries import AS_IS, read
from shardids.replication.subscriptions import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """A sequence and a column that draws from it. ``last``: ``None`` if nobody has drawn."""

    name: str
    column: str
    sequence: str
    oid: int
    increment: int
    is_readable: bool
    last: int | None


def _read(connection: Connection, names: Iterable[str]) -> list[_Numbers]:
    return read(connection, "adopt/numbers.v1", _Numbers, names=json.dumps(sorted(names)))


class Numbering:
    """Which sequences of the shards go on after which of the source. Made before writes stop.

    Raises:
        AdoptionFailed: the role may not read a sequence of the source.
    """

    def __init__(self, sides: Sides, there: Mapping[str, Definition]) -> None:
        self._sides = sides
        self._names = [table.name for table in sides.split]
        with sides.source.engine.connect() as connection:
            found = _read(connection, self._names)
        columns = {(one.name, one.column) for one in found}
        self._drawing: dict[str, list[tuple[_Numbers, tuple[str, str]]]] = {}
        tables = [there[name] for name in self._names if any(name == one for one, _ in columns)]
        for taker in sides.takers if tables else ():
            self._drawing[taker.name] = [
                (one, column) for one, column in self._of_shards(taker, tables) if column in columns
            ]
        needed = {column for drawing in self._drawing.values() for _, column in drawing}
        for one in found:
            if (one.name, one.column) in needed and not one.is_readable:
                raise AdoptionFailed(
                    f"the role may not read sequence {one.sequence}, which numbers {one.name}",
                    hint=f"At the source: grant select on sequence {one.sequence} to …",
                )

    def _of_shards(
        self, taker: Taker, tables: Iterable[Definition]
    ) -> list[tuple[_Numbers, tuple[str, str]]]:
        """Return the sequences of a node's shards, each with the source's table and column."""
        source = {
            self._sides.in_shard(table, shard): table.name for table in tables for shard in taker.shards
        }
        with taker.side.engine.connect() as connection:
            return [(one, (source[one.name], one.column)) for one in _read(connection, source)]

    def pass_on(self) -> None:
        """Set the shards' sequences past the numbers that the source has drawn, and never back.

        Raises:
            StatementFailed: a sequence of a shard has no room for the source's numbers.
        """
        if not any(self._drawing.values()):
            return
        last: dict[tuple[str, str], list[int]] = defaultdict(list)
        with self._sides.source.engine.connect() as connection:
            for one in _read(connection, self._names):
                if one.last is not None:
                    last[one.name, one.column].append(one.last)
        for taker in self._sides.takers:
            values: dict[int, list[int]] = defaultdict(list)
            for one, column in self._drawing[taker.name]:
                values[one.oid] += [*last[column], *([] if one.last is None else [one.last])]
            increments = {one.oid: one.increment for one, _ in self._drawing[taker.name]}
            furthest = {
                oid: max(found) if increments[oid] > 0 else min(found)
                for oid, found in values.items()
                if found
            }
            with taker.side.begin() as connection:
                connection.execute(_SET, {"oids": list(furthest), "values": list(furthest.values())})


def numbers_can_be_passed_on(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require that the role may read the sequences of the source that the shards go on after."""
    try:
        Numbering(sides, there)
    except AdoptionFailed as error:
        yield Refusal(reason=error.message, remedy=error.hint or "")


_SET = text("""
    select setval(oid::regclass, value)
    from unnest(cast(:oids as bigint[]), cast(:values as bigint[])) s (oid, value)""")


def sequences_are_fit(source: Connection, sides: Sides) -> Iterator[Refusal]:
    """Require that the role may set the sequences of the source that number columns."""
    for row in _sequences(source, sides):
        if not row.is_settable:
            yield Refusal(
                reason=f"the role may not set sequence {row.sequence} of {row.table}.{row.column}",
                remedy=f"At the source: grant select, update on sequence {row.sequence} to …",
            )


def sequences_that_stay(source: Connection, sides: Sides) -> Iterator[str]:
    """Yield the sequences that the way back leaves unchanged: the values do not show their numbers."""
    for row in source.execute(_SEQUENCES, {"names": sides.names}):
        if not row.is_number:
            yield (
                f"adopt back leaves sequence {row.sequence} as it is: {row.table}.{row.column}, whose default"
                " draws from it, is no number"
            )


def try_sequences(sides: Sides) -> None:
    """Compute the new positions of the sequences, and set nothing.

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
    """Let the source's sequences go on past the furthest value of their columns that is not the cluster's.

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
    """Return an expression for the number after which a sequence goes on, within its bounds."""
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
