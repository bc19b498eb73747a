"""The keys in the rows of a source, read as of one moment, in transactions that can't write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import URL

from shardids.adopt.plan.document import STAYS
from shardids.adopt.plan.inventory import ForeignKey, Inventory, Table
from shardids.adopt.plan.paths import Sorted, Way
from shardids.adopt.recovery import await_recovered
from shardids.errors import BadArgument, MissingPrivilege, StatementFailed
from shardids.pg.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.pg.definitions import Column
from shardids.pg.locks import unread
from shardids.pg.queries import batches, prepare, statement
from shardids.pg.reader import SOURCE_HINT, danger_at_source
from shardids.pg.urls import parse_url

_OPTIONS = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class Source:
    """A database that is read as of one moment, by any number of transactions that cannot write.

    One transaction stays open and gives its snapshot to the others, each of which ends soon: a transaction
    that reads thousands of tables would hold more locks than the server has room for. Until it is closed,
    VACUUM keeps the rows that the snapshot sees.

    Args:
        url: the source.
        reader: the same database, as another role, which reads all of it; ``url`` is then only asked whether
            it is the same.

    Attributes:
        skips: why no rows are read: code of others would run as a role that can write; ``None`` if they are.
    """

    def __init__(self, url: str | URL, reader: str | URL | None = None) -> None:
        self.url = parse_url(url)
        self._has_reader = reader is not None
        self._engine = _engine(self.url if reader is None else parse_url(reader))
        self._holder: Connection | None = None
        self._snapshot = ""
        self.skips: str | None = None

    def __enter__(self) -> Source:
        if self._has_reader:
            self._require_same()
        await_recovered(self._engine)
        self._holder = self._engine.connect().execution_options(**_OPTIONS)
        self._holder.begin()
        # This transaction waits while the others work.
        self._holder.execute(text("set local idle_in_transaction_session_timeout = 0"))
        self._snapshot = self._holder.scalar(text("select pg_catalog.pg_export_snapshot()"))
        with self.transaction() as connection:
            self.skips = danger_at_source(connection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holder is not None:
            self._holder.close()
        self._engine.dispose()

    def _require_same(self) -> None:
        engine = _engine(self.url)
        try:
            with engine.connect() as source, self._engine.connect() as reading:
                require_same_database(source, reading)
        except BaseException:
            self._engine.dispose()
            raise
        finally:
            engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield a connection in a transaction that sees the source as of the moment, and can't write."""
        try:
            with self._opened() as connection:
                yield connection
        except StatementFailed as error:
            raise unread(error, [("the source", self._engine)], "Plan again") from error

    @contextmanager
    def _opened(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            connection = connection.execution_options(**_OPTIONS)  # noqa: PLW2901 -- the same, with its options
            with connection.begin():
                connection.exec_driver_sql(f"set transaction snapshot '{self._snapshot}'")
                prepare(connection)
                # Names are compared, and read by people.
                connection.exec_driver_sql("set local quote_all_identifiers = off")
                yield connection

    @contextmanager
    def rows(self) -> Iterator[Connection]:
        """Yield :meth:`transaction` to read rows in, which runs code of the tables' owners.

        Raises:
            MissingPrivilege: such code could write.
        """
        if self.skips is not None:
            raise MissingPrivilege(self.skips, hint=SOURCE_HINT)
        with self.transaction() as connection:
            connection.exec_driver_sql("set local row_security = off")
            try:
                yield connection
            finally:
                # At COMMIT a cursor WITH HOLD would run.
                connection.rollback()


def _engine(url: URL) -> Engine:
    return open_engine(
        url,
        what="the source",
        administrative=True,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        connect_args={"application_name": "shardids adopt plan"},
    )


_DATABASE = text("""
    select s.system_identifier, d.oid, d.datname::text as name, c.timeline_id,
           case when not pg_is_in_recovery() then pg_postmaster_start_time() end as started_at
    from pg_control_system() s cross join pg_control_checkpoint() c
    cross join pg_database d where d.datname = current_database()""")


def require_same_database(source: Connection, reading: Connection, *, may_be_standby: bool = False) -> None:
    """Require that the role which reads the source's rows is connected to the source, or a standby of it.

    Raises:
        BadArgument: it is connected to another database or server.
    """
    there, here = source.execute(_DATABASE).one(), reading.execute(_DATABASE).one()
    is_standby = may_be_standby and here.started_at is None
    if there[:-1] != here[:-1] or not (is_standby or there.started_at == here.started_at):
        raise BadArgument(
            "the role that reads the source's rows is connected to another database or server:"
            f' "{here.name}", and the source is "{there.name}"',
            hint="--reader-url is the source's URL with another role.",
        )


SAMPLE_ROWS: Final = 100_000
"""How many rows of a table are read; of a larger one blocks are chosen at random, about as many rows."""


class Joins:
    """The tables that a statement joins to ``t0``, each to its target: at most one row."""

    def __init__(self) -> None:
        self._joins: list[sql.Composable] = []

    def key_of(self, way: Way) -> sql.Composable:
        """Return the key of ``t0``'s row, and join what leads to it."""
        return self._follow(way.path, way.key)

    def key_beyond(self, foreign_key: ForeignKey, parent: Way) -> sql.Composable:
        """Return the key of the row that a foreign key of ``t0`` refers to, and join what leads to it."""
        return self._follow((foreign_key, *parent.path), parent.key)

    def text(self) -> sql.Composable:
        """Return the joins."""
        return sql.SQL("").join(self._joins)

    def _follow(self, path: Sequence[ForeignKey], key: str) -> sql.Composable:
        alias = sql.SQL("t0")
        for foreign_key in path:
            last, alias = alias, sql.SQL(f"t{len(self._joins) + 1}")
            equal = sql.SQL(" and ").join(
                statement("{}.{} = {}.{}", alias, theirs, last, own)
                for own, theirs in zip(foreign_key.columns, foreign_key.referenced, strict=True)
            )
            joined = named(foreign_key.referenced_table)
            self._joins.append(statement(" left join {} {} on {}", joined, alias, equal))
        return statement("{}.{}", alias, key)


def unreadable(inventory: Inventory, sorted_: Sorted, name: str) -> str:
    """Return why a table's rows can't be read along its foreign keys, or nothing."""
    ahead = list(sorted_.ways[name].path)
    for foreign_key in sorted_.further.get(name, ()):
        if foreign_key.is_builtin:
            ahead += [foreign_key, *sorted_.ways[foreign_key.referenced_table].path]
    for table in dict.fromkeys([name, *(key.referenced_table for key in ahead)]):
        if not inventory.tables[table].is_readable:
            return f"the role may not read all rows of {table}"
    for foreign_key in ahead:
        if not foreign_key.is_builtin:
            return f'foreign key "{foreign_key.name}" does not compare by PostgreSQL\'s own equality'
    return ""


def is_sampled(table: Table, sample_rows: int) -> bool:
    """Return whether a table is too large for all of its rows to be read."""
    return table.rows > sample_rows


def sampled(table: Table, sample_rows: int) -> sql.Composable:
    """Return which blocks of a table to read: the same each time, all of one that is not too large."""
    if not is_sampled(table, sample_rows):
        return sql.SQL("")
    percent = 100 * sample_rows / table.rows
    return statement(" tablesample system ({}) repeatable (1)", percent)


def named(name: str) -> sql.Composable:
    """Return a table's name, which the server itself has quoted."""
    return sql.SQL(name)


def only_row(connection: Connection, query: sql.Composable) -> tuple[Any, ...]:
    """Run a statement that returns one row."""
    # Without parameters a % in a name is not a placeholder.
    unread = connection.execution_options(no_parameters=True)
    return tuple(unread.exec_driver_sql(query.as_string()).one())


_BATCH: Final = 64
"""How many tables one transaction reads: it holds a lock on each, and on its indexes, until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The evidence of a table's rows about its keys.

    ``rows``: how many were read; ``is_exact``: all of them. ``without_key``: rows that find no key.
    ``further``: by foreign key, how many rows it is filled in, and how many of these lead to another key.
    ``problem``: why the rows could not be read; then nothing else is known.
    """

    rows: int = 0
    is_exact: bool = True
    without_key: int = 0
    further: Mapping[str, tuple[int, int]]
    problem: str = ""


def check_rows(source: Source, inventory: Inventory, sorted_: Sorted, sample_rows: int) -> dict[str, Checked]:
    """Read the tables whose foreign keys do not prove that each row has one key."""
    wanted = [
        name
        for name, way in sorted_.ways.items()
        if (way.is_nullable or sorted_.further.get(name)) and inventory.tables[name].heap_bytes
    ]
    found: dict[str, Checked] = {}
    for some in batches(wanted, _BATCH):
        left = list(some)
        while left:
            try:
                with source.rows() as connection:
                    while left:
                        found[left[0]] = _checked(connection, inventory, sorted_, left[0], sample_rows)
                        left.pop(0)
            except (StatementFailed, MissingPrivilege) as error:
                # The transaction is over; what follows is read in another.
                found[left.pop(0)] = Checked(further={}, problem=error.message)
    return found


def _checked(
    connection: Connection, inventory: Inventory, sorted_: Sorted, name: str, sample_rows: int
) -> Checked:
    if problem := unreadable(inventory, sorted_, name):
        return Checked(further={}, problem=problem)
    table = inventory.tables[name]
    further = [key for key in sorted_.further.get(name, ()) if key.is_builtin]
    joins = Joins()
    way = sorted_.ways[name]
    own = joins.key_of(way)
    counts: list[sql.Composable] = [
        sql.SQL("count(*)"),
        statement("count(*) filter (where {} is null)", own),
    ]
    for foreign_key in further:
        theirs = joins.key_beyond(foreign_key, sorted_.ways[foreign_key.referenced_table])
        filled = sql.SQL(" and ").join(
            statement("t0.{} is not null", column) for column in foreign_key.columns
        )
        counts.append(statement("count(*) filter (where {})", filled))
        # Of a row whose other row is not found, nothing says that it has the same key.
        # A row without a key refers to no other shard, unless a shard takes all such rows.
        stays = sql.SQL(" and {} is not null").format(own) if way.unowned in (None, STAYS) else sql.SQL("")
        crosses = statement("{}{} and {} is distinct from {}", filled, stays, own, theirs)
        counts.append(statement("count(*) filter (where {})", crosses))
    row = only_row(
        connection,
        statement(
            "select {} from {} t0{}{}",
            sql.SQL(", ").join(counts),
            named(name),
            sampled(table, sample_rows),
            joins.text(),
        ),
    )
    pairs = zip(row[2::2], row[3::2], strict=True)
    return Checked(
        rows=row[0],
        is_exact=not is_sampled(table, sample_rows),
        without_key=row[1],
        further={key.name: pair for key, pair in zip(further, pairs, strict=True)},
    )


def highest_ids(source: Source, tables: Mapping[str, str]) -> dict[str, int]:
    """Return the highest ID of tables, as far as they can be read; ``tables``: the key's column of each."""
    found: dict[str, int] = {}
    for some in batches(list(tables), _BATCH):
        left = list(some)
        while left:
            try:
                with source.rows() as connection:
                    while left:
                        query = statement("select max(t0.{}) from {} t0", tables[left[0]], named(left[0]))
                        (highest,) = only_row(connection, query)
                        found |= {left[0]: highest} if highest is not None else {}
                        left.pop(0)
            except (StatementFailed, MissingPrivilege):
                left.pop(0)
    return found


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
        """Return how the rows of a table are spread; None if they can't be read, or there are none."""
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
        when = statement("t0.{}::timestamptz", created.name) if created else sql.SQL("null::timestamptz")
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
    """Return the column that holds the key of a table's rows, in the table or at the end of its path."""
    way = sorted_.ways[name]
    holder = way.path[-1].referenced_table if way.path else name
    return inventory.tables[holder].columns[way.key]


def _is_created(column: Column) -> bool:
    is_time = column.builtin_type in ("timestamp", "timestamptz", "date")
    return is_time and column.name.lower() in _CREATED
