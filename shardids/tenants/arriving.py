"""The arrival of a key's rows: one transaction of the target, which nobody sees into before it is committed.

The source is read in rounds, each as of one moment, REPEATABLE READ. The first copies all rows; each further
one takes over the rows that were noted since, as they are at its moment. After each round the transaction has
just the rows of that moment, so both can be compared without stopping anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from shardids.errors import MoveFailed, ShardidsError, StatementFailed
from shardids.pg.queries import batches
from shardids.pg.statement_log import logged_copy
from shardids.replication.barrier import PutOff
from shardids.replication.sides import Side
from shardids.tenants.entries import keys_of_others
from shardids.tenants.examining import code_of_others, firing_on_arrival
from shardids.tenants.family import Family, Part, run
from shardids.tenants.planning import Ends
from shardids.tenants.sequences import advance

_IDS_AT_ONCE: Final = 50_000
_AT_ONCE: Final = 5_000
"""How many noted keys one statement takes over."""
_SETTINGS: Final = text("""
    select set_config('idle_in_transaction_session_timeout', '0', true), set_config('timezone', 'UTC', true),
           set_config('datestyle', 'ISO, YMD', true), set_config('bytea_output', 'hex', true),
           set_config('row_security', 'off', true), set_config('lc_monetary', 'C', true),
           set_config('array_nulls', 'on', true), set_config('xmloption', 'content', true),
           set_config('shardids.unclaimed_writes', 'allowed', true)""")
# Values of look-ups are claimed for the source until the key lives in the target: see entries.
_TAKEN: Final = ("23505", "23P01")
"""Errors of values that another row has: of unique and of exclusion constraints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The comparison of both shards as of one moment: the number of rows of each table."""

    rows: Mapping[str, int]

    @property
    def total(self) -> int:
        """Returns the number of rows."""
        return sum(self.rows.values())


class Arriving:
    """The target of one move.

    Args:
        ends: both shards, under their leases.
        move: the number of the move.
        family: its tables.
        returns: former moves of the key out of the target, whose refusal of it ends with the arrival.
        trusted: roles whose code may run as the role that moves.
    """

    def __init__(
        self, ends: Ends, move: int, family: Family, returns: Sequence[int], trusted: Sequence[str] = ()
    ) -> None:
        self._trusted = trusted
        self._source = ends.source
        self._target = ends.target
        self._schema = ends.target_schema
        self._move = move
        self._family = family
        self._returns = list(returns)
        self._connection: Connection | None = None
        self._process: int | None = None
        self._moment = ""
        self._always: Mapping[str, frozenset[str]] = {}
        self._trees: frozenset[str] = frozenset()
        self._referred: frozenset[str] = frozenset()
        self._unlisted: set[int] = set()
        self._left: set[int] = set()
        self._given: dict[int, str] = {}

    @property
    def is_open(self) -> bool:
        """Returns whether the transaction is open."""
        return self._connection is not None

    @property
    def _arrival(self) -> Connection:
        if self._connection is None:
            raise MoveFailed("the transaction with the key's rows is not open")
        return self._connection

    def copy(self) -> int:
        """Open the transaction and copy all rows; return how many.

        Raises:
            MoveFailed: a row does not fit the target.
        """
        self.close()
        self._connection = self._target.engine.connect()
        # It ends with the transaction.
        self._connection.detach()
        self._process = self._connection.scalar(text("select pg_backend_pid()"))
        self._connection.execute(_SETTINGS)
        self._lock(self._connection)
        self._connection.execute(_RETURN, {"moves": self._returns})
        self._connection.execute(_ARRIVE, {"move": self._move})
        self._always = self._identities(self._connection)
        self._trees = frozenset(self._connection.scalars(_TREES, {"schema": self._schema}))
        self._referred = frozenset(self._connection.scalars(_REFERRED, {"schema": self._schema}))
        for part in self._family.parts:
            run(self._connection, self._beside(part))
        total = 0
        with self._moment_of_source() as source:
            for part in self._family.parts:
                query = sql.SQL("select {} from {} a where {}").format(
                    _names(part, "a"),
                    sql.Identifier(self._family.schema, part.name),
                    self._family.owns(part, "a", self._family.schema),
                )
                total += self._copied(source, query, sql.Identifier(self._schema, part.name), part)
        run(self._connection, sql.SQL("set constraints all immediate"))
        self._advance(reads_rows=True)
        for part in self._family.parts:
            # Nobody else's ANALYZE sees the rows: rounds would be planned for the table without them.
            analyze = sql.SQL("analyze (skip_locked) {}").format(sql.Identifier(self._schema, part.name))
            run(self._connection, analyze)
        return total

    def _lock(self, connection: Connection) -> None:
        """Keep triggers and other code from the tables until the transaction ends, and look for some."""
        names = [part.name for part in self._family.parts]
        tables = [sql.Identifier(self._schema, name) for name in names]
        run(connection, sql.SQL("lock table {} in row exclusive mode").format(sql.SQL(", ").join(tables)))
        for refusal in (
            *code_of_others(connection, [table.as_string() for table in tables], self._trusted),
            *firing_on_arrival(connection, self._schema, names),
        ):
            raise MoveFailed(refusal.reason, hint=refusal.remedy)

    def _identities(self, connection: Connection) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for row in connection.execute(_ALWAYS, {"schema": self._schema}):
            found.setdefault(row.name, set()).add(row.column)
        return {name: frozenset(columns) for name, columns in found.items()}

    def _advance(self, *, reads_rows: bool) -> None:
        with self._source.autocommit() as source:
            advance(self._family, source, self._arrival, self._schema, reads_rows=reads_rows)

    def _beside(self, part: Part) -> sql.Composable:
        return sql.SQL("create temporary table {} on commit drop as select {} from {} a with no data").format(
            _brought(part), _names(part, "a"), sql.Identifier(self._schema, part.name)
        )

    @contextmanager
    def _moment_of_source(self) -> Iterator[Connection]:
        """Yield a connection to the source that sees it as of one moment, which becomes the last one."""
        options = {"isolation_level": "REPEATABLE READ"}
        with self._source.engine.connect().execution_options(**options) as source, source.begin():
            source.execute(_SETTINGS)
            moment: str = source.scalar(text("select pg_current_snapshot()::text"))
            yield source
            self._moment = moment

    def _copied(self, source: Connection, query: sql.Composable, table: sql.Composable, part: Part) -> int:
        out = sql.SQL("copy ({}) to stdout").format(query)
        into = sql.SQL("copy {} ({}) from stdin").format(table, _names(part))
        try:
            with logged_copy(source, out) as reading, logged_copy(self._arrival, into) as writing:
                cursor = writing.cursor
                for data in reading:
                    writing.write(data)
            return cursor.rowcount
        except psycopg.Error as error:
            raise self._unfit(part, str(error).splitlines()[0]) from error

    def _unfit(self, part: Part, reason: str) -> MoveFailed:
        return MoveFailed(
            f'rows of table {part.name} can\'t arrive in schema {self._schema} on node "{self._target.name}":'
            f" {reason}",
            hint="Undo the move with --abort, and change the rows or the table.",
        )

    def ids(self, committed: Connection | None = None) -> Iterator[Sequence[int]]:
        """Yield the values of all rows that have arrived that may be IDs, some ten thousand at a time.

        ``committed`` is a connection to the target that sees them; without, the open transaction does.
        """
        self._unlisted.clear()
        for part, column in ((one, column) for one in self._family.parts for column in one.ids):
            query = sql.SQL("select a.{0} from {1} a where {2} and a.{0} is not null").format(
                sql.Identifier(column),
                sql.Identifier(self._schema, part.name),
                self._family.owns(part, "a", self._schema),
            )
            # All in memory: a cursor of the server would be in the way of the COPY of a later round.
            found = run(self._arrival if committed is None else committed, query).scalars().all()
            yield from batches(found, _IDS_AT_ONCE)

    def new_ids(self) -> list[int]:
        """Return the IDs of rows that were noted since this was last asked, or since :meth:`ids` was."""
        found = sorted(self._unlisted)
        self._unlisted.clear()
        return found

    def given_ids(self) -> dict[int, str]:
        """Return the IDs of rows that went to other keys since this was last asked, each with its key."""
        found, self._given = self._given, {}
        return found

    def follow(self, *, is_last: bool = False) -> int:
        """Take over the rows that were noted since the last round; return how many notes there were.

        ``is_last``: writers wait.

        Raises:
            MoveFailed: a row does not fit the target, or the primary key of one is another key's there.
            PutOff: in the last round, if rows have exchanged values that are unique.
        """
        return self._round(is_last=is_last, compares=False)[0]

    def _round(self, *, is_last: bool, compares: bool) -> tuple[int, Verified]:
        before = self._moment
        with self._moment_of_source() as source:
            noted = {
                part: [
                    row.key
                    for row in source.execute(
                        _NOTED, {"move": self._move, "part": part.number, "before": before}
                    )
                ]
                for part in self._family.parts
            }
            changed = {part: keys for part, keys in noted.items() if keys}
            for part, keys in changed.items():
                run(self._arrival, sql.SQL("delete from {}").format(_brought(part)))
                for first in range(0, len(keys), _AT_ONCE):
                    query = sql.SQL("select {} from {} a join {} on {} where {}").format(
                        _names(part, "a"),
                        sql.Identifier(self._family.schema, part.name),
                        _keys(part, keys[first : first + _AT_ONCE]),
                        _same_key(part, "a", "k"),
                        self._family.owns(part, "a", self._family.schema),
                    )
                    self._copied(source, query, _brought(part), part)
                for column in part.ids:
                    brought = sql.SQL("select {0} from {1} where {0} is not null").format(
                        sql.Identifier(column), _brought(part)
                    )
                    ids = set(run(self._arrival, brought).scalars())
                    self._unlisted |= ids
                    self._given = {one: key for one, key in self._given.items() if one not in ids}
            self._left.clear()
            self._take_over(changed, source, is_last=is_last)
            self._find_given(changed, source)
            verified = self._compare(source) if compares else Verified(rows={})
        return sum(map(len, noted.values())), verified

    def _find_given(self, changed: Mapping[Part, list[str]], source: Connection) -> None:
        """Find rows that are other keys' now, among the noted ones: they are not looked for by their IDs."""
        for part, keys in changed.items():
            for some in batches(keys, _AT_ONCE) if part.ids and self._left else ():
                among = sql.SQL("join {} on {}").format(_keys(part, some), _same_key(part, "a", "k"))
                self._given |= keys_of_others(source, self._family, part, sorted(self._left), among)
        self._unlisted.difference_update(self._given)

    def _take_over(self, changed: Mapping[Part, list[str]], source: Connection, *, is_last: bool) -> None:
        # Rows that are put first keep what refers to them from being deleted with those that they leave.
        try:
            with self._arrival.begin_nested():
                is_doubtful = self._clear(changed)
                if is_doubtful and is_last:
                    raise PutOff("rows that others may refer to have got another value of an identity column")
                self._put(changed)
                self._delete(changed)
        except (StatementFailed, DBAPIError) as error:
            if _sqlstate(error) not in _TAKEN:
                raise self._unfit(next(iter(changed)), str(error).splitlines()[0]) from error
            if is_last:
                raise PutOff("rows of the key have exchanged values that are unique") from error
            # A value that is unique has gone from a row that was deleted to another.
            try:
                self._delete(changed)
                self._clear(changed)
                self._put(changed)
            except (StatementFailed, DBAPIError) as second:
                raise self._unfit(next(iter(changed)), str(second).splitlines()[0]) from second
            is_doubtful = True
        if is_doubtful:
            # What was deleted may have taken rows with it that were not noted.
            self._compare(source)

    def _clear(self, changed: Mapping[Part, list[str]]) -> bool:
        """Delete rows to be put that have another value in a column which only an INSERT sets.

        Return whether there were some that others may refer to.
        """
        is_doubtful = False
        for part in reversed(list(changed)):
            columns = sorted(self._always.get(part.name, frozenset()).difference(part.key))
            if not columns:
                continue
            differs = sql.SQL(" or ").join(
                sql.SQL("{} is distinct from {}").format(sql.Identifier("a", one), sql.Identifier("b", one))
                for one in columns
            )
            clear = sql.SQL("delete from {} a using {} b where {} and {} and ({})").format(
                sql.Identifier(self._schema, part.name),
                _brought(part),
                _same_key(part, "a", "b"),
                self._family.owns(part, "a", self._schema),
                differs,
            )
            is_doubtful |= run(self._arrival, clear).rowcount > 0 and part.name in self._referred
        return is_doubtful

    def _put(self, changed: Mapping[Part, list[str]]) -> None:
        for part in changed:
            always = self._always.get(part.name, frozenset())
            # Those of the primary key too: equal ones need not be the same, as 1.0 and 1.00.
            free = [name for name in part.names if name not in always]
            action: sql.Composable = sql.SQL("nothing")
            if free:
                settings = sql.SQL(", ").join(
                    sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in free
                )
                action = sql.SQL("update set {} where {}").format(
                    settings, self._family.owns(part, "a", self._schema)
                )
            # Equal keys may have been noted twice.
            rows = sql.SQL("select distinct on ({}) {} from {}").format(
                sql.SQL(", ").join(map(sql.Identifier, part.key)), _names(part), _brought(part)
            )
            put = sql.SQL(
                "insert into {} as a ({}) overriding system value {} on conflict ({}) do {}"
            ).format(
                sql.Identifier(self._schema, part.name),
                _names(part),
                rows,
                sql.SQL(", ").join(map(sql.Identifier, part.key)),
                action,
            )
            written = run(self._arrival, put).rowcount
            brought = run(self._arrival, sql.SQL("select count(*) from ({}) rows").format(rows)).scalar_one()
            if written != brought and free:
                raise self._unfit(part, f"{brought - written} have primary keys of another key's rows there")

    def _delete(self, changed: Mapping[Part, list[str]]) -> None:
        for part, keys in reversed(list(changed.items())):
            # Rows that refer to each other go in one statement.
            at_once = max(len(keys), 1) if part.name in self._trees else _AT_ONCE
            for first in range(0, len(keys), at_once):
                delete = sql.SQL(
                    "delete from {} a using {} where {} and {} and not exists (select from {} b where {})"
                    " returning array[{}]::bigint[]"
                ).format(
                    sql.Identifier(self._schema, part.name),
                    _keys(part, keys[first : first + at_once]),
                    _same_key(part, "a", "k"),
                    self._family.owns(part, "a", self._schema),
                    _brought(part),
                    _same_key(part, "a", "b"),
                    sql.SQL(", ").join(sql.Identifier("a", column) for column in part.ids),
                )
                for ids in run(self._arrival, delete).scalars():
                    self._left.update(one for one in ids if one is not None)

    def verify(self) -> Verified:
        """Take one more round, and compare all rows of both shards as of its moment.

        Raises:
            MoveFailed: they differ.
        """
        return self._round(is_last=False, compares=True)[1]

    def _compare(self, source: Connection) -> Verified:
        counts: dict[str, int] = {}
        for part in self._family.parts:
            there = run(source, self._digest(part, self._family.schema)).one()
            here = run(self._arrival, self._digest(part, self._schema)).one()
            if tuple(there) != tuple(here):
                raise MoveFailed(
                    f"table {part.name} differs: {there.rows} rows of the key in schema {self._family.schema}"
                    f" (digest {there.digest}), and {here.rows} in {self._schema} (digest {here.digest})",
                    hint="Undo the move with --abort, then start it again.",
                )
            counts[part.name] = there.rows
        return Verified(rows=counts)

    def _digest(self, part: Part, schema: str) -> sql.Composed:
        return sql.SQL(
            "select count(*) as rows,"
            " coalesce(sum(hashtextextended(row({})::text, 0)::numeric), 0)::text as digest"
            " from {} a where {}"
        ).format(_names(part, "a"), sql.Identifier(schema, part.name), self._family.owns(part, "a", schema))

    def has_arrived(self) -> bool:
        """Return whether the rows were committed on the server that the target has now."""
        with self._target.begin() as connection:
            return bool(connection.scalar(_HAS_ARRIVED, {"move": self._move}))

    def confirm(self) -> None:
        """Record that the key lives in the target, if its rows have arrived. Idempotent."""
        with self._target.begin() as connection:
            connection.execute(_CONFIRM, {"move": self._move})

    def record_home(self) -> None:
        """Record that the rows have arrived and the key lives in the target. Idempotent."""
        with self._target.begin() as connection:
            connection.execute(_RECORD_HOME, {"move": self._move})

    def forget(self) -> None:
        """Delete the record of the arrival. Idempotent."""
        with self._target.begin() as connection:
            connection.execute(_FORGET, {"move": self._move})

    def commit(self) -> None:
        """Make the rows visible."""
        # Rows of the last rounds have values that the source's sequences have given since.
        self._advance(reads_rows=False)
        self._arrival.commit()
        self._process = None
        self.close()

    def close(self) -> None:
        """End the transaction; roll it back unless it was committed. Idempotent.

        After a COMMIT that got no answer it returns when the server has ended it, one way or the other.

        Raises:
            ConnectionFailed: the server does not answer.
        """
        if self._connection is not None:
            with suppress(ShardidsError, SQLAlchemyError):
                self._connection.close()
            self._connection = None
        if self._process is not None:
            with self._target.autocommit() as connection:
                connection.execute(_END, {"process": self._process})
            self._process = None


def is_home(target: Side, move: int) -> bool:
    """Return whether the target has recorded that the key of a move lives there."""
    with target.begin() as connection:
        return bool(connection.scalar(_IS_HOME, {"move": move}))


def _sqlstate(error: StatementFailed | DBAPIError) -> str | None:
    if isinstance(error, StatementFailed):
        return error.sqlstate
    return getattr(error.orig, "sqlstate", None)


def _names(part: Part, row: str | None = None) -> sql.Composable:
    return sql.SQL(", ").join(
        sql.Identifier(name) if row is None else sql.Identifier(row, name) for name in part.names
    )


def _brought(part: Part) -> sql.Composable:
    return sql.Identifier("pg_temp", f"shardids_arrived_{part.number}")


def _keys(part: Part, keys: Sequence[str]) -> sql.Composed:
    """Return noted primary keys as the relation k. They stay text: Python's floats would round numeric."""
    types = {column.name: column.type for column in part.columns}
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(types[name])) for name in part.key
    )
    return sql.SQL("jsonb_to_recordset({}::jsonb) as k ({})").format(
        sql.Literal(f"[{','.join(keys)}]"), columns
    )


def _same_key(part: Part, one: str, other: str) -> sql.Composable:
    return sql.SQL(" and ").join(
        sql.SQL("{} = {}").format(sql.Identifier(one, name), sql.Identifier(other, name)) for name in part.key
    )


_END: Final = text("""
    select pg_terminate_backend(a.pid, 10000) from pg_stat_activity a
    where a.pid = :process and starts_with(a.application_name, 'shardids_key_')""")
_RETURN: Final = text("""
    insert into shardids.key_return (move) select unnest(cast(:moves as bigint[])) on conflict do nothing""")
_ARRIVE: Final = text("insert into shardids.key_arrival (move) values (:move)")
_HAS_ARRIVED: Final = text("select exists (select from shardids.key_arrival where move = :move)")
_IS_HOME: Final = text("select exists (select from shardids.key_arrival where move = :move and is_home)")
_CONFIRM: Final = text("update shardids.key_arrival set is_home = true where move = :move and not is_home")
_RECORD_HOME: Final = text("""
    insert into shardids.key_arrival (move, is_home) values (:move, true)
    on conflict (move) do update set is_home = true""")
_FORGET: Final = text("delete from shardids.key_arrival where move = :move")
_ALWAYS: Final = text("""
    select c.relname::text as name, a.attname::text as column
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attidentity = 'a'
    where c.relnamespace = to_regnamespace(quote_ident(:schema))""")
_TREES: Final = text("""
    select c.relname::text from pg_constraint k join pg_class c on c.oid = k.conrelid
    where k.contype = 'f' and k.conrelid = k.confrelid
      and c.relnamespace = to_regnamespace(quote_ident(:schema))""")
_REFERRED: Final = text("""
    select distinct c.relname::text from pg_constraint k join pg_class c on c.oid = k.confrelid
    where k.contype = 'f' and c.relnamespace = to_regnamespace(quote_ident(:schema))""")
# A transaction is told by its top number, also in its savepoints.
_NOTED: Final = text("""
    select distinct c.key::text as key from shardids.key_change c
    where c.move = :move and c.part = :part and c.xact >= pg_snapshot_xmin(cast(:before as pg_snapshot))
      and not pg_visible_in_snapshot(c.xact, cast(:before as pg_snapshot))""")
