"""Compares every row of the source with those of the shards, while both change.

Rows are compared by hashes of their texts, in chunks: those of a shard whose primary key has a certain hash.
A chunk that differs is read row by row, and a row counts as different only if it stays so: the source has it
unchanged from before to after the moment at which the node has applied all changes from before. Nothing is
installed for it on the source. Rows are read with no rights beyond reading: see
:mod:`shardids.catalog.reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import text

from shardids.adopt.definitions import Definition
from shardids.adopt.events import Compared, OnEvent
from shardids.adopt.placing import HOME, NO_SHARD, placed_rows
from shardids.adopt.plan import Kind, TablePlan
from shardids.adopt.relay import lost_keys, lost_rows
from shardids.adopt.replication import await_confirmed
from shardids.adopt.sides import Sides, Taker
from shardids.adopt.source import require_same_database
from shardids.catalog.queries import batches
from shardids.catalog.reader import Reader, Refused, reading_as_reader
from shardids.errors import AdoptionFailed

_ROWS_A_CHUNK: Final = 10_000
_CHUNKS_READ: Final = 64
"""How many chunks that differ are read row by row at a time."""
_ROUNDS: Final = 20
"""How often rows are read again that were changed while they were read."""
_NAMED: Final = 5
_Chunk = tuple[int, int]
_Rows = Mapping[str, int]
"""Hashes of rows, by the text of their primary keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table to compare; ``source_rows``: those of the source, each with its shard, for FROM."""

    plan: TablePlan
    definition: Definition
    source_rows: str

    @property
    def key(self) -> str:
        return f"row({', '.join(map(_quoted, self.identity))})::text"

    @property
    def identity(self) -> Sequence[str]:
        found = self.definition.primary_key or self.definition.identity
        return found or tuple(self.definition.columns)

    @property
    def digest(self) -> str:
        columns = ", ".join(f"{_quoted(name)}::text" for name in self.definition.columns)
        return f"hashtextextended(row({columns})::text, 0)"

    def bucket(self, buckets: int) -> str:
        return f"(hashtextextended({self.key}, 1) & {buckets - 1})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A node, with the readers of the source and of the node."""

    taker: Taker
    source: Reader
    node: Reader


def compare(sides: Sides, there: Mapping[str, Definition], on_event: OnEvent) -> int:
    """Compares all rows; returns how many there are, each node's reference tables counted.

    Raises:
        AdoptionFailed: rows differ, and stay so; the message names tables and keys. Or rows refer to rows
            that are not in their shard.
    """
    rows = 0
    with ExitStack() as kept:
        source = kept.enter_context(source_reader(sides))
        pairs = [
            _Pair(taker=taker, source=source, node=kept.enter_context(node_reader(taker)))
            for taker in sides.takers
        ]
        for plan in (*sides.split, *sides.reference):
            definition = there[plan.name]
            table = _Table(plan=plan, definition=definition, source_rows=placed_rows(sides, plan, there))
            if plan.kind is Kind.DERIVED:
                _require_keys(source, table)
            found = sum(_compare(sides, pair, table) for pair in pairs)
            on_event(Compared(table=plan.name, rows=found))
            rows += found
        for pair in pairs:
            _check_foreign_keys(sides, pair, there)
    return rows


@contextmanager
def source_reader(sides: Sides) -> Iterator[Reader]:
    """Yields a reader of the source.

    Raises:
        BadArgument: the role that reads them is connected to another database.
    """
    with reading_as_reader(sides.reading.engine, "the source", is_node=False) as reader:
        if sides.reading is not sides.source:
            with sides.source.autocommit() as source, sides.reading.autocommit() as reading:
                require_same_database(source, reading)
        yield reader


def node_reader(taker: Taker) -> AbstractContextManager[Reader]:
    """Returns a reader of a node, to be entered."""
    return reading_as_reader(taker.side.engine, f'node "{taker.side.name}"')


def _require_keys(source: Reader, table: _Table) -> None:
    """Requires that the rows of a derived table find a key: those that don't are on no node."""
    lost = f"{table.source_rows} where {HOME} is null"
    (found,) = all_rows(source, f"select count(*) as n from {lost}")  # noqa: S608 -- quoted
    if found["n"]:
        some = [row["key"] for row in all_rows(source, lost_keys(table.definition, lost))]
        raise lost_rows(some, table.plan, table.definition, found["n"])


_FOREIGN_KEYS = text("""
    select c.conname::text, c.conrelid::regclass::text as child, c.confrelid::regclass::text as parent,
           (select string_agg(format('p.%I = c.%I', q.attname, a.attname), ' and ' order by k.number)
            from unnest(c.conkey, c.confkey) with ordinality k (own, theirs, number)
            join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.own
            join pg_attribute q on q.attrelid = c.confrelid and q.attnum = k.theirs) as joined,
           (select string_agg(format('c.%I is not null', a.attname), ' and ')
            from unnest(c.conkey) k (own) join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.own)
             as complete
    from pg_constraint c
    where c.contype = 'f' and c.conparentid = 0 and c.conrelid = any (cast(:names as regclass[]))""")


def _check_foreign_keys(sides: Sides, pair: _Pair, there: Mapping[str, Definition]) -> None:
    """Requires what rows refer to in their own shards: replication does not check foreign keys.

    A node applies transactions whole and in order, so this holds at every moment if it holds at the source.
    """
    taker = pair.taker
    names = [sides.in_shard(there[table.name], shard) for shard in taker.shards for table in sides.split]
    with taker.side.engine.connect() as connection, connection.begin():
        keys = connection.execute(_FOREIGN_KEYS, {"names": names}).all()
    for key in keys:
        (lost,) = all_rows(
            pair.node,
            f"select count(*) as n from {key.child} c where {key.complete}"  # noqa: S608 -- quoted
            f" and not exists (select from {key.parent} p where {key.joined})",
        )
        if lost["n"]:
            raise AdoptionFailed(
                f'node "{taker.side.name}": {lost["n"]} rows of {key.child} refer by "{key.conname}" to rows'
                f" of {key.parent} that are not there: they have another key, or are missing",
                hint="Drop the foreign key in the shards, or give the rows the same key at the source.",
            )


def _compare(sides: Sides, pair: _Pair, table: _Table) -> int:
    """Compares the rows of one table on one node."""
    buckets = 1
    while buckets * _ROWS_A_CHUNK * max(1, sides.cluster.shard_count) < table.plan.rows:
        buckets *= 2
    is_split = table.plan.kind is not Kind.REFERENCE
    where = f"{HOME} in ({', '.join(map(str, pair.taker.shards))})" if is_split else "true"
    original = _digests(pair.source, table.source_rows, table, buckets, where)
    copy = _digests(pair.node, _node_rows(sides, pair.taker, table), table, buckets, "true")
    odd = [chunk for chunk in original.keys() | copy.keys() if original.get(chunk) != copy.get(chunk)]
    for chunks in batches(sorted(odd), _CHUNKS_READ):
        _settle(sides, pair, table, buckets, chunks)
    return sum(count for count, _digest in original.values())


def _settle(sides: Sides, pair: _Pair, table: _Table, buckets: int, chunks: Sequence[_Chunk]) -> None:
    """Reads the rows of chunks until each was the same on both sides, or differs without being changed."""
    names = ", ".join(map(str, chunks))
    chosen = f"({HOME}, {table.bucket(buckets)}) in ({names})"
    original = _hashes(pair.source, table.source_rows, table, chosen)
    doubted: set[str] | None = None
    suspects: set[str] = set()
    for _round in range(_ROUNDS):
        await_confirmed(sides, lambda _bytes: None)
        copy = _hashes(pair.node, _node_rows(sides, pair.taker, table), table, chosen)
        after = _hashes(pair.source, table.source_rows, table, chosen)
        # The node has at least the changes from before ``original``, and at most those from before ``after``.
        odd = {
            key
            for key in (original.keys() | copy.keys() if doubted is None else doubted)
            if copy.get(key) not in (original.get(key), after.get(key))
        }
        unchanged = {key for key in odd if original.get(key) == after.get(key)}
        if unchanged & suspects:
            raise _differ(pair.taker, table, unchanged & suspects, original, copy)
        if not odd:
            return
        original, doubted, suspects = after, odd, unchanged
    raise AdoptionFailed(
        f"the rows of {table.plan.name} are changed too quickly to be compared",
        hint="Compare again when the source has less to do: shardids adopt compare",
    )


def _differ(taker: Taker, table: _Table, keys: Iterable[str], original: _Rows, copy: _Rows) -> AdoptionFailed:
    found = sorted(keys)
    told = [
        f"{key} {'differs' if key in original.keys() & copy.keys() else f'is {_where(key, copy)}'}"
        for key in found[:_NAMED]
    ]
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return AdoptionFailed(
        f'{len(found)} rows of {table.plan.name} are not the same on node "{taker.side.name}":'
        f" ({', '.join(table.identity)}) = {'; '.join(told)}{more}",
        hint="Undo the adoption with shardids adopt abort, and find out who wrote to the shards' tables.",
    )


def _where(key: str, copy: _Rows) -> str:
    return "only there" if key in copy else "missing there"


def _node_rows(sides: Sides, taker: Taker, table: _Table) -> str:
    """Returns the rows of a table in the shards of a node, each with its shard, for FROM."""
    if table.plan.kind is Kind.REFERENCE:
        return f"(select {NO_SHARD} as {HOME}, t.* from {table.definition.name} t) t"  # noqa: S608 -- quoted
    columns = ", ".join(map(_quoted, table.definition.columns))
    return "({}) t".format(
        " union all ".join(
            f"select {shard} as {HOME}, {columns} from {sides.in_shard(table.definition, shard)}"  # noqa: S608 -- quoted
            for shard in taker.shards
        )
    )


def _digests(
    reader: Reader, rows: str, table: _Table, buckets: int, where: str
) -> dict[_Chunk, tuple[int, int]]:
    """Returns the number of rows and the sum of their hashes, by shard and bucket."""
    found = all_rows(
        reader,
        f"select {HOME} as home, {table.bucket(buckets)} as bucket, count(*) as n,"  # noqa: S608 -- quoted
        f" sum({table.digest}::numeric)::text as digest from {rows} where {where} group by 1, 2",
    )
    return {(row["home"], row["bucket"]): (row["n"], int(row["digest"])) for row in found}


def _hashes(reader: Reader, rows: str, table: _Table, where: str) -> dict[str, int]:
    query = f"select {table.key} as key, {table.digest} as digest from {rows} where {where}"  # noqa: S608 -- quoted
    return {row["key"]: row["digest"] for row in all_rows(reader, query)}


def all_rows(reader: Reader, query: str) -> list[dict[str, Any]]:
    """Returns the rows of a query, by column, however long it takes.

    Raises:
        MissingPrivilege: nothing is read there.
        StatementFailed: the query failed.
    """
    (answer,) = reader.read([query], statement_timeout="0")
    if isinstance(answer, Refused):
        raise reader.error(answer)
    return answer


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
