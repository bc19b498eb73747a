"""Runs statements about claims, and about the rows that they are for, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from shardids.catalog import claims
from shardids.catalog.claims import SQL_TYPES
from shardids.catalog.lookups import Value
from shardids.catalog.topology import Node
from shardids.errors import StatementFailed
from shardids.models.lookups import Lookup

T = TypeVar("T")

_TRANSIENT: Final = ("40001", "40P01")
"""What a statement fails with because of others, and not a second time."""
_ATTEMPTS: Final = 50


def run_alone(
    engine: Engine, statement: str, given: Sequence[Any] = (), *, before: str = ""
) -> Sequence[Any]:
    """Runs a statement in a transaction of its own; one that others made impossible, again.

    The engine is in autocommit mode. ``before`` begins a transaction, which is then rolled back.
    """

    def run() -> Sequence[Any]:
        with engine.connect() as connection, _after(connection, before):
            return connection.exec_driver_sql(statement, tuple(given)).all()

    return attempted(run)


def attempted(run: Callable[[], T]) -> T:
    """Runs a transaction; one that others made impossible, again."""
    left = _ATTEMPTS
    while True:
        try:
            return run()
        except (DBAPIError, StatementFailed) as error:
            left -= 1
            if not left or sqlstate_of(error) not in _TRANSIENT:
                raise


class Rows(Protocol):
    """Reads the rows of look-up keys."""

    def with_values(
        self, node: Node, lookup: Lookup, shard: int, values: Sequence[Value], *, lock_ms: int | None = None
    ) -> Sequence[Value]:
        """Returns those of the values that rows of a shard have, on its node.

        With ``lock_ms``, when all who had written to the table have ended; it fails with 55P03 if that takes
        longer.
        """


class OwnRows:
    """Reads rows as the session's role, as its other statements do. ``engine_of`` gives a node's engine."""

    def __init__(self, engine_of: Callable[[Node], Engine], schema_of: Callable[[int], str]) -> None:
        self._engine_of = engine_of
        self._schema_of = schema_of

    def with_values(
        self, node: Node, lookup: Lookup, shard: int, values: Sequence[Value], *, lock_ms: int | None = None
    ) -> Sequence[Value]:
        """Reads them: see :class:`Rows`."""
        schema, type_ = self._schema_of(shard), SQL_TYPES[lookup.kind.__name__]
        before = ""
        if lock_ms is not None:
            before = claims.wait_for_writers(schema, lookup.table, lookup.column, lock_ms=lock_ms)
        statement = claims.rows_in(schema, lookup.table, lookup.column, type_)
        found = run_alone(self._engine_of(node), statement, (list(values),), before=before)
        return [row[0] for row in found]


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
