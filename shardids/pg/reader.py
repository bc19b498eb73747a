"""Reading of other roles' tables with no rights beyond reading.

To read a table runs code of its owner: policies, casts, functions in indexes, statistics, partition keys.
So it is read by ``shardids_reader.read``, a function that runs queries as a role which may read all data
and do nothing else. Its calls have a connection to themselves, are rolled back, and the connection is closed.
See ``docs/decisions/0044-reading.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.pool import Pool, PoolProxiedConnection

from shardids.errors import ConnectionFailed, MissingPrivilege, ShardidsError, StatementFailed
from shardids.pg.connections import driver_connection, has_own_session
from shardids.pg.queries import batches, prepare, rows
from shardids.pg.schemas import administers
from shardids.pg.sqlfiles import read_sql

Row = TypeVar("Row")

FILE: Final = "reading/reader.v1"
"""What installs the reader in a database."""
HINT: Final = (
    "To let shardids read as a role that can do nothing else, as a superuser in that database:"
    f" shardids sql {FILE} | psql --single-transaction; or as such a role: shardids upgrade"
)
SOURCE_HINT: Final = (
    "Read it as a role that can do nothing else. As a superuser at the source: CREATE ROLE reading LOGIN"
    " PASSWORD '…'; GRANT pg_read_all_data TO reading; then add --reader-url and the URL of that role"
)
_CANCEL_S: Final = 10.0
_READ: Final = "select number, answer, code, message from shardids_reader.read(%s::pg_catalog.text[])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The reason why a query has no answer; ``sqlstate`` is empty where it was not run."""

    reason: str
    sqlstate: str = ""

    @property
    def is_skipped(self) -> bool:
        """Returns whether the query was not run, for want of a reader."""
        return not self.sqlstate


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The rights of a session to read: a row of ``reading/state.v1.sql``."""

    fault: str | None
    is_alone: bool
    only_reads: bool
    role: str

    @property
    def danger(self) -> str | None:
        """Returns why the session's role may not read tables of others itself; ``None`` if it may."""
        if self.is_alone or self.only_reads:
            return None
        return f'role "{self.role}" can write, code of other roles would run as it'


class Reader:
    """A runner of queries on a database without the rights of the session's role.

    Where the database has no reader, the session's own role reads if it can't write, or if no role that could
    have planted code owns anything in the database. Otherwise nothing is read.

    Args:
        connection: a connection that runs nothing else.
        what: the database, in words.
        is_node: whether it is a node; the source of an adoption does not have a reader.

    Attributes:
        skips: why nothing is read; ``None`` if it is.
    """

    def __init__(self, connection: Connection, what: str, *, is_node: bool = True) -> None:
        self._connection = connection
        self._what = what
        self._hint = HINT if is_node else SOURCE_HINT
        with _rolled_back(connection):
            state = _state(connection, is_node=is_node)
        fault = state.fault
        if fault is None and not has_own_session(connection):
            fault = "a pooler is between, and code of others could leave something in its sessions"
        self._is_own = fault is not None or not is_node
        self.skips: str | None = None
        if self._is_own and state.danger is not None:
            self.skips = state.danger + (f", and {what} has no reader: {fault}" if is_node else "")

    def read(
        self, queries: Sequence[str], *, statement_timeout: str | None = None, before: str | None = None
    ) -> list[list[dict[str, Any]] | Refused]:
        """Return the rows of each query, by column, or why there are none.

        A query names its columns, qualifies tables, and casts to built-in types: the rows are sent as JSON.
        ``before`` are statements that the session's role runs first, in the same transaction: they take
        locks, and run no code of others.
        """
        if self.skips is not None:
            return [Refused(reason=self.skips)] * len(queries)
        found: list[list[dict[str, Any]] | Refused] = []
        for batch in batches(queries):
            found += self._read(list(map(_as_json, batch)), statement_timeout, before)
        return found

    def take_snapshot(self) -> None:
        """Begin the transaction for all later reads: under REPEATABLE READ, as of now."""
        self._connection.begin()
        prepare(self._connection)
        self._connection.exec_driver_sql("set local idle_in_transaction_session_timeout = 0")

    def rows(self, query: str, record: Callable[..., Row]) -> list[Row]:
        """Return the rows of one query.

        Raises:
            MissingPrivilege: nothing is read here.
            StatementFailed: the query failed.
        """
        (answer,) = self.read([query])
        if isinstance(answer, Refused):
            raise self.error(answer)
        return [record(**row) for row in answer]

    def cancel(self) -> None:
        """End the query that another thread reads by, if it can be reached."""
        with suppress(psycopg.Error):
            driver_connection(self._connection).cancel_safe(timeout=_CANCEL_S)

    def with_values(self, statement: str, values: Sequence[Any]) -> str:
        """Return a statement with values in place of its ``%s``, as :meth:`read` takes it."""
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)  # noqa: S101 -- the only driver
        return psycopg.ClientCursor(driver).mogrify(statement, values)

    def error(self, refused: Refused, what: str = "") -> ShardidsError:
        """Return the exception for a query that has no answer; ``what`` was to be read."""
        begin = f"{self._what}: {what} can't be read: " if what else f"{self._what}: "
        if self.skips is not None:
            return MissingPrivilege(begin + refused.reason, hint=self._hint)
        return StatementFailed(begin + refused.reason, sqlstate=refused.sqlstate)

    def _read(
        self, queries: list[str], timeout: str | None, before: str | None
    ) -> Iterator[list[dict[str, Any]] | Refused]:
        with _rolled_back(self._connection):
            prepare(self._connection)
            if before is not None:
                self._connection.execution_options(no_parameters=True).exec_driver_sql(before)
            if timeout is not None:
                self._connection.exec_driver_sql(f"set local statement_timeout = '{timeout}'")
            if self._is_own:
                self._connection.exec_driver_sql(f"select {_set_texts()}")
                return iter([self._read_itself(query) for query in queries])
            answers = self._connection.exec_driver_sql(_READ, (queries,)).all()
        return iter([_answer(row.answer, row.code, row.message) for row in answers])

    def _read_itself(self, query: str) -> list[dict[str, Any]] | Refused:
        raw = self._connection.execution_options(no_parameters=True)
        try:
            with self._connection.begin_nested():
                return _answer(raw.exec_driver_sql(query).scalar(), None, None)
        except ConnectionFailed:
            raise
        except ShardidsError as error:
            return Refused(reason=error.message, sqlstate=error.sqlstate or "42501")


def _answer(answer: Any, code: str | None, message: str | None) -> list[dict[str, Any]] | Refused:
    if answer is None:
        return Refused(reason=message or "code of others ended the query", sqlstate=code or "SI099")
    there: list[dict[str, Any]] = answer
    return there


def _as_json(query: str) -> str:
    return f"select coalesce(jsonb_agg(to_jsonb(r)), '[]') from ({query}) r"  # noqa: S608 -- our own query


@contextmanager
def _rolled_back(connection: Connection) -> Iterator[None]:
    if connection.in_transaction():
        yield
        return
    # At COMMIT what was deferred would run as the session's role.
    with connection.begin() as transaction:
        try:
            yield
        finally:
            if transaction.is_active:
                transaction.rollback()


@contextmanager
def reading_as_reader(
    engine: Engine,
    what: str,
    *,
    is_node: bool = True,
    isolation_level: IsolationLevel = "READ COMMITTED",
) -> Iterator[Reader]:
    """Yield a reader on a separate connection, beside those of the engine's pool.

    ``what`` is the database, in words. The connection is closed afterwards: code of others may have left
    prepared statements or locks in its session.
    """
    # Of the same arguments, and with the same listeners.
    pool = engine.pool.recreate()
    try:
        with Connection(engine, _connected(engine, pool)) as connection:
            connection.execution_options(isolation_level=isolation_level, postgresql_readonly=True)
            yield Reader(connection, what, is_node=is_node)
    finally:
        pool.dispose()


def _connected(engine: Engine, pool: Pool) -> PoolProxiedConnection:
    try:
        return pool.connect()
    except engine.dialect.loaded_dbapi.Error as error:
        # As Engine.connect() does, for those who listen to errors.
        Connection._handle_dbapi_exception_noconnection(error, engine.dialect, engine)
        raise


@cache
def _body() -> str:
    found = re.search(r"as \$\$(.*)\$\$;\n\n  comment", read_sql(FILE), re.DOTALL)
    assert found is not None  # noqa: S101 -- our own file
    return found[1]


def _state(connection: Connection, *, is_node: bool = True) -> _State:
    prepare(connection, read_body=_body(), is_node=is_node, administers=administers(connection))
    (state,) = rows(connection, read_sql("reading/state.v1"), _State)
    return state


@cache
def _set_texts() -> str:
    """Return statements that set the settings of the reader's function: the answers are then the same."""
    found = re.findall(r" set (\w+) = ('[^']*'|\w+)", read_sql(FILE).partition("security definer")[2])
    return ", ".join(
        f"pg_catalog.set_config('{name}', {value if value[0] == chr(39) else repr(value)}, true)"
        for name, value in found
        if name != "search_path"
    )


def require_no_code_of_others(connection: Connection, what: str) -> None:
    """Refuse what names of a shard's schema are looked up for, where others could have put code behind them.

    ``what`` would run it, as the session's role. In the open transaction.

    Raises:
        MissingPrivilege: the role can write, and another role owns objects in the database.
    """
    state = _state(connection)
    if state.danger is not None:
        raise MissingPrivilege(
            f'{what} could run code of other roles that own objects in the database as role "{state.role}"',
            hint="Connect as the owner of the shards' tables, or use a database without objects of others.",
        )


def danger_at_source(connection: Connection) -> str | None:
    """Return why rows of an adoption's source may not be read as the session's role; ``None`` if they may.

    In the open transaction. Nothing is installed at a source, and a schema ``shardids`` proves nothing there.
    """
    return _state(connection, is_node=False).danger


def has_reader(connection: Connection) -> bool:
    """Return whether a node's database has the reader of this version; in the open transaction."""
    return _state(connection).fault is None


def install_reader(connection: Connection) -> str | None:
    """Create the reader in a node's database, or bring it up to date; in the open transaction.

    Returns why it can't: the role may not create roles, or may not grant ``pg_read_all_data``. On Citus there
    is none, and no reason: rows are on workers, where Citus would have to log in as the reader.
    """
    if connection.scalar(text("select engine from shardids.node")) == "citus":
        return None
    raw = connection.execution_options(no_parameters=True)
    try:
        with connection.begin_nested():
            raw.exec_driver_sql(read_sql(FILE))
    except (MissingPrivilege, StatementFailed) as error:
        return error.message
    return None


def remove_reader(connection: Connection) -> None:
    """Take the reader away from a node's database; in the open transaction."""
    connection.execution_options(no_parameters=True).exec_driver_sql(read_sql("reading/reader.v1.down"))
