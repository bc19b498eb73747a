"""Compares every row of the source with those of the shards, while both change.

Rows are compared by hashes of their texts and shards, in chunks: those whose primary key has a certain hash.
A chunk that differs is read row by row, and then, by their primary keys, the rows of it that differ. A row
counts as different only if it stays so: the source has it unchanged from before to after the moment at which
the node has applied all changes from before. Nothing is installed for it on the source. Rows are read with no
rights beyond reading: see :mod:`shardids.pg.reader`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

from sqlalchemy import text

from shardids.adopt.plan.document import STAYS, Kind, TablePlan
from shardids.adopt.plan.source import require_same_database
from shardids.adopt.run.following import await_confirmed
from shardids.adopt.run.relay import lost_keys, lost_rows
from shardids.adopt.run.sides import Sides, Taker
from shardids.adopt.run.sparing import Sparing
from shardids.errors import AdoptionFailed
from shardids.pg.definitions import Definition
from shardids.pg.queries import batches, quoted
from shardids.pg.reader import Reader, Refused, reading_as_reader
from shardids.replication.steps import Event
from shardids.replication.subscriptions import PATIENCE_S, flush


class RowsDiffer(AdoptionFailed):
    """Rows of the shards are not those of the source, and stay so."""


Found = TypeVar("Found")
Other = TypeVar("Other")
HOME: Final = "shardids_home"
"""The name of the column with a row's shard."""
NO_SHARD: Final = "0"
"""The shard of all rows of a table that is not split."""
_VERSION: Final = "shardids_version"
"""The name of the column with the transaction that wrote a row of the source as it is."""


WHOLE: Final = ("", "true")
"""As a portion of a table: all of it."""


def placed_rows(
    sides: Sides, plan: TablePlan, there: Mapping[str, Definition], portion: tuple[str, str] = WHOLE
) -> str:
    """Return the rows of a table at the source, each with its shard, for FROM; NULL: it has no key.

    ``portion``: the table, or the partition of it, that holds them, and a condition on its rows ``t``.
    """
    part, condition = portion
    name, version = part or there[plan.name].name, f"t.xmin::text as {_VERSION}"
    if plan.kind is Kind.REFERENCE:
        return f"(select {NO_SHARD} as {HOME}, {version}, t.* from {name} t where {condition}) t"  # noqa: S608 -- quoted
    key_table, joins = plan.name, ""
    of = "t."
    for number, hop in enumerate(plan.path if plan.kind is Kind.DERIVED else ()):
        last, of, key_table = of, f"p{number}.", hop.table
        equal = " and ".join(
            f"{of}{quoted(theirs)} = {last}{quoted(own)}"
            for own, theirs in zip(hop.columns, hop.referenced, strict=True)
        )
        joins += f" left join {hop.table} p{number} on {equal}"
    holder = next(table for table in sides.split if table.name == key_table)
    shard = sides.shard_of_key(holder, there[key_table], of=of)
    # Rows that are to stay at the source have no shard.
    kept = f" and {of}{quoted(plan.key or '')} is not null" if plan.unowned == STAYS else ""
    return f"(select {shard} as {HOME}, {version}, t.* from {name} t{joins} where {condition}{kept}) t"  # noqa: S608 -- quoted


_ROWS_A_CHUNK: Final = 200
_MOST_CHUNKS: Final = 1 << 17
"""How many chunks a table has at most: the digests of all are in memory."""
_ROWS_READ: Final = 500_000
"""How many rows of chunks that differ are read at a time; those of one chunk are, however many it has."""
_KEYS_READ: Final = 1000
"""How many rows a query reads by their primary keys; a tenth of it if keys have several columns."""
_MOST_ARGUMENTS: Final = 90
"""How many columns one call joins: a function takes a hundred arguments. A table has at most 1,600."""
_ROUNDS: Final = 20
"""How often rows are read again that were changed while they were read."""
_NAMED: Final = 5
_CANCEL_AGAIN_S: Final = 0.2
_BYTES: Final = ' collate pg_catalog."C"'
"""Texts are hashed and equal by their bytes: columns may have several collations, or such as ignore case."""
_Row = tuple[int | None, str]
"""A row: its shard, if it has one, and the text of its primary key."""
_Rows = Mapping[_Row, int]
"""Hashes of rows."""
_Digests = Mapping[int, tuple[int, int]]
"""The number of rows and the sum of their hashes, by chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(Event):
    """The rows of a table are the same at the source and in the shards; ``copies`` nodes have all of them."""

    table: str
    rows: int
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table to compare; ``source_rows``: those of the source, each with its shard, for FROM."""

    plan: TablePlan
    definition: Definition
    source_rows: str

    @property
    def key(self) -> str:
        if len(self.definition.primary_key) == 1:
            return f"{quoted(*self.definition.primary_key)}::text{_BYTES}"
        return _text(self.identity)

    @property
    def identity(self) -> Sequence[str]:
        found = self.definition.primary_key or self.definition.identity
        return found or tuple(self.definition.columns)

    @property
    def digest(self) -> str:
        return f"hashtextextended({_text(tuple(self.definition.columns))}, {HOME})"

    @property
    def chunks(self) -> int:
        """Returns how many chunks it has: a power of two."""
        chunks = 1
        while chunks < min(self.plan.rows / _ROWS_A_CHUNK, _MOST_CHUNKS):
            chunks *= 2
        return chunks

    @property
    def chunk(self) -> str:
        return f"(hashtextextended({self.key}, 1) & {self.chunks - 1})"

    def is_one_of(self, reader: Reader, rows: Sequence[Sequence[str]]) -> str:
        """Return the condition that a row has one of these keys, for the index of the primary key.

        Each is the texts of its columns, and then of all.
        """
        types = [self.definition.columns[name].builtin_type for name in self.identity]
        if not self.definition.primary_key or None in types:
            return reader.with_values(f"{self.key} = any(%s::text[])", [[row[-1] for row in rows]])
        columns = [
            (quoted(name), quoted("pg_catalog", str(type_)))
            for name, type_ in zip(self.identity, types, strict=True)
        ]
        if len(columns) == 1:
            ((name, type_),) = columns
            return reader.with_values(f"{name} = any(%s::text[]::{type_}[])", [[row[0] for row in rows]])
        one = " and ".join(f"{name} = %s::text::{type_}" for name, type_ in columns)
        values = [value for row in rows for value in row[:-1]]
        return reader.with_values(" or ".join([f"({one})"] * len(rows)), values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A node, with the readers of the source and of the node."""

    taker: Taker
    source: Reader
    node: Reader


def compare(
    sides: Sides,
    there: Mapping[str, Definition],
    sparing: Sparing,
    *,
    compared: Collection[str] = (),
    on_table: Callable[[str], None] = lambda _name: None,
) -> int:
    """Compare all rows; return how many there are, each node's reference tables counted.

    ``compared``: tables to leave out, which were compared before. ``on_table`` receives each of the others.

    Raises:
        RowsDiffer: rows differ, and stay so; the message names tables and keys. Or rows refer to rows that
            are not in their shard.
        AdoptionFailed: the nodes don't catch up, or rows are changed too quickly.
    """
    rows = 0
    with ExitStack() as kept:
        source = kept.enter_context(source_reader(sides))
        pairs = [
            _Pair(taker=taker, source=source, node=kept.enter_context(node_reader(taker)))
            for taker in sides.takers
        ]
        for plan in (*sides.split, *sides.reference):
            if plan.name in compared:
                continue
            definition = there[plan.name]
            table = _Table(plan=plan, definition=definition, source_rows=placed_rows(sides, plan, there))
            found = _compare(sides, pairs, table, there, sparing)
            on_table(plan.name)
            copies = len(pairs) if plan.kind is Kind.REFERENCE else 1
            sparing(Compared(table=plan.name, rows=found // copies, copies=copies))
            rows += found
        _at_once(pairs, lambda pair: _check_foreign_keys(sides, pair, there), lambda: None)
    return rows


def _at_once(
    pairs: Sequence[_Pair], read: Callable[[_Pair], Found], beside: Callable[[], Other]
) -> tuple[list[Found], Other]:
    """Return the results for all nodes, which are read at once, and of the work ``beside`` that.

    Queries of the nodes end if it fails.
    """
    with ThreadPoolExecutor(len(pairs)) as nodes:
        reading = {nodes.submit(read, pair): pair.node for pair in pairs}
        try:
            other = beside()
            return [one.result() for one in reading], other
        except BaseException:
            # A query that has not begun yet misses its end.
            while left := wait(reading, timeout=_CANCEL_AGAIN_S).not_done:
                for one in left:
                    reading[one].cancel()
            raise


@contextmanager
def source_reader(sides: Sides) -> Iterator[Reader]:
    """Yield a reader of the source.

    Raises:
        BadArgument: the role that reads them is connected to another database.
    """
    with reading_as_reader(sides.reading.engine, "the source", is_node=False) as reader:
        if sides.reading is not sides.source:
            with sides.source.autocommit() as source, sides.reading.autocommit() as reading:
                require_same_database(source, reading, may_be_standby=True)
        yield reader


_REPLAYED = text("""
    select not pg_is_in_recovery() or pg_last_wal_replay_lsn() >= cast(:position as pg_lsn)""")
_POLL_S: Final = 0.02


def _await_replay(sides: Sides) -> None:
    """Wait until the standby that rows are read from, if any, has all that the source has written by now.

    Raises:
        AdoptionFailed: it does not get there for a long time.
    """
    if sides.reading is sides.source:
        return
    with sides.source.autocommit() as source, sides.reading.autocommit() as reading:
        position, deadline = flush(source), time.monotonic() + PATIENCE_S
        while not reading.scalar(_REPLAYED, {"position": position}):
            if time.monotonic() > deadline:
                raise AdoptionFailed(
                    f"the standby that rows are read from has not replayed the source's log up to {position}"
                    f" within {PATIENCE_S:.0f} s",
                    hint="See pg_stat_replication at the source, or read from the source itself.",
                )
            time.sleep(_POLL_S)


def node_reader(taker: Taker) -> AbstractContextManager[Reader]:
    """Return a reader of a node, to be entered."""
    return reading_as_reader(taker.side.engine, f'node "{taker.side.name}"')


def _require_keys(source: Reader, table: _Table) -> None:
    """Require that the rows of a derived table find a key: those that don't are on no node."""
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
    where c.contype = 'f' and c.convalidated and c.conparentid = 0
      and c.conrelid = any (cast(:names as regclass[]))""")


def _check_foreign_keys(sides: Sides, pair: _Pair, there: Mapping[str, Definition]) -> None:
    """Require what rows refer to in their own shards: replication does not check foreign keys.

    A node applies transactions whole and in order, so this holds at every moment if it holds at the source.
    """
    taker = pair.taker
    names = [sides.in_shard(there[table.name], shard) for shard in taker.shards for table in sides.split]
    with taker.side.engine.connect() as connection, connection.begin():
        keys = connection.execute(_FOREIGN_KEYS, {"names": names}).all()
    counts = [
        f"select count(*) as n from {key.child} c where {key.complete}"  # noqa: S608 -- quoted
        f" and not exists (select from {key.parent} p where {key.joined})"
        for key in keys
    ]
    for key, (lost,) in zip(keys, answers(pair.node, counts), strict=True):
        if lost["n"]:
            raise RowsDiffer(
                f'node "{taker.side.name}": {lost["n"]} rows of {key.child} refer by "{key.conname}" to rows'
                f" of {key.parent} that are not there: they have another key, or are missing",
                hint="Drop the foreign key in the shards, or give the rows the same key at the source.",
            )


_PARTS = text("""
    select format('%I.%I', n.nspname, c.relname) as name, pg_relation_size(c.oid)::bigint as bytes,
           current_setting('block_size')::integer as block_bytes
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = any (cast(:parts as regclass[])) and c.relkind = 'r' order by 1""")


def _source_digests(
    sides: Sides, source: Reader, table: _Table, there: Mapping[str, Definition], sparing: Sparing
) -> _Digests:
    """Read the digests of a table's rows at the source, all at once or by portions of its blocks.

    Rows that are changed meanwhile may be read in two portions, or in none. They are read again.
    """
    most = sparing.limits.portion_bytes
    if most is None:
        return _digests(source, table.source_rows, table)
    with sides.reading.autocommit() as connection:
        parts = connection.execute(_PARTS, {"parts": list(table.definition.parts)}).all()
    portions = []
    for part in parts:
        blocks = max(most // part.block_bytes, 1)
        firsts = range(0, max(part.bytes // part.block_bytes, 1), blocks)
        for first in firsts:
            # Rows that are added meanwhile may be behind the last block.
            end = "" if first == firsts[-1] else f" and t.ctid < '({first + blocks},0)'"
            rows = placed_rows(sides, table.plan, there, (part.name, f"t.ctid >= '({first},0)'{end}"))
            started = time.monotonic()
            portions.append(_digests(source, rows, table))
            sparing.rest(blocks * part.block_bytes, time.monotonic() - started)
    return _added(portions)


def _compare(
    sides: Sides, pairs: Sequence[_Pair], table: _Table, there: Mapping[str, Definition], sparing: Sparing
) -> int:
    """Compare the rows of one table at the source with those on all nodes."""
    source = pairs[0].source
    copies, original = _at_once(
        pairs,
        lambda pair: _digests(pair.node, _node_rows(sides, pair.taker, table), table),
        lambda: _source_digests(sides, source, table, there, sparing),
    )
    is_split = table.plan.kind is not Kind.REFERENCE
    odd: dict[int, int] = {}
    # Each node has all rows of a reference table.
    for copy in [_added(copies)] if is_split else copies:
        odd |= {
            chunk: max(found[0] for found in (original.get(chunk), copy.get(chunk)) if found)
            for chunk in original.keys() | copy.keys()
            if original.get(chunk) != copy.get(chunk)
        }
    for chunks in _portions(odd):
        chosen = f"{table.chunk} in ({', '.join(map(str, chunks))})"
        reading = _Reading(table, source)
        rows = reading.chosen(source, table.source_rows, chosen)
        # A row without a shard is on no node, so its chunk has one row more than theirs.
        if any(shard is None for shard, _key in rows):
            _require_keys(source, table)
        for pair in pairs:
            shards = set(pair.taker.shards) if is_split else {int(NO_SHARD)}
            own = {row: digest for row, digest in rows.items() if row[0] in shards}
            _settle(sides, pair, reading, own, chosen)
    return sum(count for count, _digest in original.values()) * (1 if is_split else len(pairs))


def _added(digests: Iterable[_Digests]) -> _Digests:
    """Return the digests of all nodes' rows together."""
    found: dict[int, tuple[int, int]] = {}
    for chunk, (count, digest) in chain.from_iterable(one.items() for one in digests):
        before = found.get(chunk, (0, 0))
        found[chunk] = before[0] + count, before[1] + digest
    return found


def _portions(chunks: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield the chunks, as many at a time as may be read; ``chunks`` has the number of rows of each."""
    portion: list[int] = []
    rows = 0
    for chunk, count in sorted(chunks.items()):
        if portion and rows + count > _ROWS_READ:
            yield portion
            portion, rows = [], 0
        portion.append(chunk)
        rows += count
    if portion:
        yield portion


class _Reading:
    """Reads rows of a table by chunks, and reads those again that it has read.

    Attributes:
        versions: of the source's rows, as they were last read.
    """

    def __init__(self, table: _Table, source: Reader) -> None:
        self.table = table
        self.versions: dict[_Row, str] = {}
        self._source = source
        self._texts: dict[str, Sequence[str]] = {}

    def chosen(self, reader: Reader, rows: str, where: str) -> dict[_Row, int]:
        """Return the rows that meet a condition."""
        columns = [f"{quoted(name)}::text" for name in self.table.identity]
        query = (
            f"select {HOME} as home, array[{', '.join([*columns, self.table.key])}] as texts,"  # noqa: S608 -- quoted
            f" {_VERSION if reader is self._source else 'null'} as version,"
            f" {self.table.digest} as digest from {rows} where {where}"
        )
        found: dict[_Row, int] = {}
        for row in all_rows(reader, query):
            key = row["texts"][-1]
            self._texts[key] = row["texts"]
            found[row["home"], key] = row["digest"]
            if reader is self._source:
                self.versions[row["home"], key] = row["version"]
        return found

    def again(self, reader: Reader, rows: str, wanted: Iterable[_Row]) -> dict[_Row, int]:
        """Return rows that were read before, in whatever shard they are, if they are there."""
        texts = [self._texts[key] for key in sorted({key for _, key in wanted})]
        found: dict[_Row, int] = {}
        for some in batches(texts, _KEYS_READ if len(self.table.identity) == 1 else _KEYS_READ // 10):
            found |= self.chosen(reader, rows, self.table.is_one_of(reader, some))
        return found


def _settle(sides: Sides, pair: _Pair, reading: _Reading, original: _Rows, chosen: str) -> None:
    """Read rows of a node until each is the same at the source, or differs without being changed.

    ``original``: its rows at the source, of those that are ``chosen``.

    Raises:
        RowsDiffer: rows differ.
        AdoptionFailed: rows are changed again and again.
    """
    table = reading.table
    there, here = table.source_rows, _node_rows(sides, pair.taker, table)
    doubted: Collection[_Row] | None = None
    suspects: set[_Row] = set()
    for _round in range(_ROUNDS):
        await_confirmed(sides, lambda _bytes: None)
        if doubted is None:
            copy = reading.chosen(pair.node, here, chosen)
            rows = original.keys() | copy.keys()
            doubted = [row for row in rows if original.get(row) != copy.get(row)]
        else:
            copy = reading.again(pair.node, here, doubted)
        _await_replay(sides)
        versions = {row: reading.versions.get(row) for row in doubted}
        after = reading.again(pair.source, there, doubted)
        # The node has at least the changes from before ``original``, and at most those from before ``after``.
        odd = {row for row in doubted if copy.get(row) not in (original.get(row), after.get(row))}
        # A row that was changed and changed back, such as a lock of a queue, is another version.
        unchanged = {
            row
            for row in odd
            if original.get(row) == after.get(row) and versions[row] == reading.versions.get(row)
        }
        if unchanged & suspects:
            raise _differ(pair.taker, table, unchanged & suspects, original, copy)
        if not odd:
            return
        original, doubted, suspects = after, odd, unchanged
    raise AdoptionFailed(
        f"the rows of {table.plan.name} are changed too quickly to be compared",
        hint="Compare again when the source has less to do: shardids adopt run --compare",
    )


def _differ(taker: Taker, table: _Table, rows: Iterable[_Row], original: _Rows, copy: _Rows) -> RowsDiffer:
    found = sorted(rows, key=str)
    told = [
        f"({row[1]}) {'differs' if row in original.keys() & copy.keys() else f'is {_where(row, copy)}'}"
        for row in found[:_NAMED]
    ]
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return RowsDiffer(
        f'{len(found)} rows of {table.plan.name} are not the same on node "{taker.side.name}":'
        f" ({', '.join(table.identity)}) = {'; '.join(told)}{more}",
        hint="Undo the adoption with shardids adopt abort, and find out who wrote to the shards' tables.",
    )


def _where(row: _Row, copy: _Rows) -> str:
    return f"only there, in shard {row[0]}" if row in copy else f"missing there, in shard {row[0]}"


def _node_rows(sides: Sides, taker: Taker, table: _Table) -> str:
    """Return the rows of a table in the shards of a node, each with its shard, for FROM."""
    if table.plan.kind is Kind.REFERENCE:
        return f"(select {NO_SHARD} as {HOME}, t.* from {table.definition.name} t) t"  # noqa: S608 -- quoted
    columns = ", ".join(map(quoted, table.definition.columns))
    return "({}) t".format(
        " union all ".join(
            f"select {shard} as {HOME}, {columns} from {sides.in_shard(table.definition, shard)}"  # noqa: S608 -- quoted
            for shard in taker.shards
        )
    )


def _digests(reader: Reader, rows: str, table: _Table) -> _Digests:
    found = all_rows(
        reader,
        f"select {table.chunk} as chunk, count(*) as n, coalesce(sum({table.digest}), 0)::text as digest"  # noqa: S608 -- quoted
        f" from {rows} group by 1",
    )
    return {row["chunk"]: (row["n"], int(row["digest"])) for row in found}


def _text(columns: Sequence[str]) -> str:
    """Return an expression for the text of columns, which tells any two rows apart."""
    joined = [
        f"concat_ws(',', {', '.join(f'quote_nullable({quoted(name)}::text)' for name in some)})"
        for some in batches(columns, _MOST_ARGUMENTS)
    ]
    return (f"concat_ws(',', {', '.join(joined)})" if len(joined) > 1 else joined[0]) + _BYTES


def all_rows(reader: Reader, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query, by column, however long it takes.

    Raises:
        MissingPrivilege: nothing is read there.
        StatementFailed: the query failed.
    """
    (answer,) = answers(reader, [query])
    return answer


def answers(reader: Reader, queries: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each query, as :func:`all_rows` returns them."""
    for answer in reader.read(queries, statement_timeout="0"):
        if isinstance(answer, Refused):
            raise reader.error(answer)
        yield answer
