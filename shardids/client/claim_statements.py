"""Runs one statement about claims, in a transaction of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from shardids.errors import StatementFailed

_TRANSIENT: Final = ("40001", "40P01")
"""What a statement fails with because of others, and not a second time."""
_ATTEMPTS: Final = 50


def run_alone(
    engine: Engine, statement: str, given: Sequence[Any] = (), *, before: str = ""
) -> Sequence[Any]:
    """Runs a statement in a transaction of its own; one that others made impossible, again.

    The engine is in autocommit mode. ``before`` begins a transaction, which is then rolled back.
    """
    left = _ATTEMPTS
    while True:
        try:
            with engine.connect() as connection, _after(connection, before):
                return connection.exec_driver_sql(statement, tuple(given)).all()
        except (DBAPIError, StatementFailed) as error:
            left -= 1
            if not left or sqlstate_of(error) not in _TRANSIENT:
                raise


def sqlstate_of(error: DBAPIError | StatementFailed) -> str | None:
    """Returns the error code that the server gave."""
    return error.sqlstate if isinstance(error, StatementFailed) else getattr(error.orig, "sqlstate", None)


@contextmanager
def _after(connection: Connection, before: str) -> Iterator[None]:
    if not before:
        yield
        return
    try:
        connection.exec_driver_sql(before)
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("rollback")
