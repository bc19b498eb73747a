"""A source, opened to be read: read-only, all of it as of one moment, without holding a lock for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import URL

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.queries import prepare, read
from shardids.catalog.reader import SOURCE_HINT, danger_at_source
from shardids.catalog.urls import parse_url
from shardids.errors import BadArgument, MissingPrivilege, StatementFailed

_NO_LOCK: Final = "55P03"
_MOST_HOLDERS: Final = 5
_OPTIONS = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class Source:
    """A database that is read as of one moment, by any number of transactions, none of which can write.

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

    def explained(self, error: StatementFailed) -> StatementFailed:
        """Returns an error that names who keeps a table locked, if that is why a statement failed."""
        if error.sqlstate != _NO_LOCK:
            return error
        with self._engine.connect() as connection:
            holders = read(connection, "adopt/lock_holders.v1", dict[str, Any])
        if not holders:
            return StatementFailed(
                error.message, hint="The lock is gone by now: plan again.", sqlstate=error.sqlstate
            )
        return StatementFailed(
            "tables of the source are locked: " + "; ".join(map(_holder, holders[:_MOST_HOLDERS])),
            hint="Plan again when that has ended, or end it: select pg_terminate_backend(PROCESS)",
            sqlstate=error.sqlstate,
        )

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yields a connection in a transaction that sees the source as of the moment, and can't write."""
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
        """Yields :meth:`transaction` to read rows in, which runs code of the tables' owners.

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
    select s.system_identifier, pg_postmaster_start_time() as started_at, d.oid, d.datname::text as name
    from pg_control_system() s cross join pg_database d where d.datname = current_database()""")


def require_same_database(source: Connection, reading: Connection) -> None:
    """Requires that the role which reads the source's rows is connected to the source.

    Raises:
        BadArgument: it is connected to another database or server.
    """
    there, here = source.execute(_DATABASE).one(), reading.execute(_DATABASE).one()
    if there != here:
        raise BadArgument(
            "the role that reads the source's rows is connected to another database or server:"
            f' "{here.name}", and the source is "{there.name}"',
            hint="--reader-url is the source's URL with another role.",
        )


def _holder(row: dict[str, Any]) -> str:
    if row["gid"] is not None:
        who = f"prepared transaction {row['gid']!r}"
    else:
        application = f" ({row['application']})" if row["application"] else ""
        who = f"process {row['pid']}{application}"
    what = "locked by" if row["is_granted"] else "waited for, to lock it, by"
    return f"{row['table']} is {what} {who} of role {row['role']}"
