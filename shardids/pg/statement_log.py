"""Logs of an engine's statements, COMMIT and COPY included, with their durations and without values."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Dialect, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.pool import PoolProxiedConnection

from shardids.logs import error_code, logger

log = logger("sql")

_BEGUN: Final = "shardids_log_begun"
_SERVER: Final = "shardids_log_server"
"""The execution option that engines whose statements are logged have: the server, as errors name it."""
_LONGEST: Final = 1000
"""How many characters of a statement are shown."""
_NODE = re.compile(r'node "(.*)"')
# Where it is not certain that a literal or a comment ends, the rest of the statement goes with it.
_HIDDEN = re.compile(
    r"""(?P<name>"(?:[^"]|"")*")
      | --[^\n]*
      | '(?:[^'\\]|'')*'(?!')
      | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
      | (?:['"]|/\*|\$\w*\$).*""",
    re.DOTALL | re.VERBOSE,
)


def shown_statement(statement: str) -> str:
    """Return a statement in one line, with ``…`` for comments and literals other than numbers."""
    shown = _HIDDEN.sub(lambda found: found["name"] or " … ", statement[:_LONGEST])
    return " ".join(shown.split())


def log_statements(engine: Engine, what: str) -> None:
    """Log an engine's statements at DEBUG, if that is on now; else nothing listens to the engine.

    ``what`` names the server, as errors do.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    engine.update_execution_options(**{_SERVER: what})
    _log_ends(engine.dialect, what)

    # A connection executes one statement at a time.
    @event.listens_for(engine, "before_cursor_execute")
    def _begin(connection: Connection, *_: object) -> None:
        connection.info[_BEGUN] = time.perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def _end(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if (begun := connection.info.pop(_BEGUN, None)) is not None:
            _tell(what, statement, begun)

    @event.listens_for(engine, "handle_error")
    def _fail(context: ExceptionContext) -> None:
        if context.connection is None or context.statement is None:
            return
        if (begun := context.connection.info.pop(_BEGUN, None)) is not None:
            _tell(what, context.statement, begun, context.original_exception)


@contextmanager
def logged_copy(connection: Connection, statement: sql.SQL | sql.Composed) -> Iterator[psycopg.Copy]:
    """Yield a COPY by the driver. It is logged as a statement, which ends with the block.

    Its errors are the driver's. The engine must not be one of asyncio.
    """
    what = connection.get_execution_options().get(_SERVER)
    with cast(psycopg.Cursor, connection.connection.cursor()) as cursor:
        if what is None:
            with cursor.copy(statement) as copy:
                yield copy
        else:
            with _timed(what, statement.as_string(cursor), cursor), cursor.copy(statement) as copy:
                yield copy


def _log_ends(dialect: Dialect, what: str) -> None:
    """Log how transactions end. SQLAlchemy has no event after COMMIT: the methods that send it are wrapped.

    A dialect is that of one engine.
    """

    def ends(statement: str, send: Callable[[PoolProxiedConnection], None]) -> Callable[..., None]:
        def end(connection: PoolProxiedConnection) -> None:
            driver: Any = connection.dbapi_connection
            if driver.info.transaction_status == TransactionStatus.IDLE:
                send(connection)  # The driver has nothing to send.
                return
            with _timed(what, statement):
                send(connection)

        return end

    def ends_prepared(statement: str, send: Callable[..., None]) -> Callable[..., None]:
        def end(connection: Connection, xid: object, *is_prepared: bool, **options: bool) -> None:
            # Of what is not prepared, the driver sends only the first word.
            words = statement.partition(" ")[0] if is_prepared == (False,) else f"{statement} …"
            with _timed(what, words):
                send(connection, xid, *is_prepared, **options)

        return end

    for name, statement, logged in (
        ("do_commit", "COMMIT", ends),
        ("do_rollback", "ROLLBACK", ends),
        ("do_prepare_twophase", "PREPARE TRANSACTION", ends_prepared),
        ("do_commit_twophase", "COMMIT PREPARED", ends_prepared),
        ("do_rollback_twophase", "ROLLBACK PREPARED", ends_prepared),
    ):
        setattr(dialect, name, logged(statement, getattr(dialect, name)))


@contextmanager
def _timed(what: str, statement: str, cursor: psycopg.Cursor | None = None) -> Iterator[None]:
    """Log a statement that the block sends; with the rows that it moved if there is a ``cursor``."""
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        _tell(what, statement, begun, error)
        raise
    _tell(what, statement, begun, rows=cursor.rowcount if cursor else -1)


def _tell(
    what: str, statement: str, begun: float, error: BaseException | None = None, *, rows: int = -1
) -> None:
    """Log a statement that has ended; negative ``rows`` are unknown."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    seconds, shown, found = time.perf_counter() - begun, shown_statement(statement), _NODE.fullmatch(what)
    fields: dict[str, object] = {"server": what, "statement": shown, "seconds": round(seconds, 6)}
    fields |= ({"node": found[1]} if found else {}) | ({"rows": rows} if rows >= 0 else {})
    how = f"{error_code(error)} after" if error else "took"
    count = f", {rows} rows" if rows >= 0 else ""
    log.debug("%s: %s %.1f ms%s: %s", what, how, seconds * 1000, count, shown, extra=fields)
