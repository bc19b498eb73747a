"""The queries in ``sql/``, each run in its own transaction with short lock and statement timeouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, LiteralString, TypeVar

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.pg.sqlfiles import read_sql

BATCH = 256
"""How many shards one transaction reads: it holds a lock on each relation until it ends."""

DROPPED_MEANWHILE: Final = frozenset({"3F000", "42P01", "42703", "42704", "42883", "XX000"})
"""Errors when a migration or a move drops an object between two looks at the server's catalogs: there
a schema, table, column, object or function does not exist; "could not open relation", "cache lookup
failed"."""

AS_IS: Final = {"no_parameters": True}
"""Execution options of statements without parameters: a % in a name is not a placeholder."""

_LIMITS = {
    "search_path": "pg_catalog, pg_temp",
    "lock_timeout": "2s",
    "statement_timeout": "60s",
    # Compiling a query over the server's catalogs takes longer than running it.
    "jit": "off",
    # What is read of some hundred shards goes to disk with less.
    "work_mem": "64MB",
    # The server has other work than this.
    "max_parallel_workers_per_gather": "0",
}

Row = TypeVar("Row")
Item = TypeVar("Item")


def read(connection: Connection, file: str, record: type[Row], **settings: object) -> list[Row]:
    """Run a file of ``sql/`` and return its rows. ``settings``: those it reads, without ``shardids.``."""
    with connection.begin():
        prepare(connection, **settings)
        return rows(connection, read_sql(file), record)


def rows(connection: Connection, query: str, record: Callable[..., Row]) -> list[Row]:
    """Run a query in the open transaction and return its rows."""
    # Without parameters the text goes to the server unread: a % in it is not a placeholder.
    found = connection.execution_options(no_parameters=True).exec_driver_sql(query)
    return [record(**row._mapping) for row in found]


def prepare(connection: Connection, **settings: object) -> None:
    """Set timeouts, ``search_path`` and the query's settings for the open transaction."""
    values = _LIMITS | {f"shardids.{name}": str(value) for name, value in settings.items()}
    connection.execute(
        text("""select set_config(name, value, true)
                from unnest(:names ::text[], :values ::text[]) setting (name, value)"""),
        {"names": list(values), "values": list(values.values())},
    )


def batches(items: Sequence[Item], size: int = BATCH) -> Iterator[Sequence[Item]]:
    """Yield the items, ``size`` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def statement(template: LiteralString, *parts: object) -> sql.Composed:
    """Return a statement with parts in place of its ``{}``: strings are names, other values literals."""
    return sql.SQL(template).format(
        *(sql.Identifier(part) if isinstance(part, str) else part for part in parts)
    )


def comment_on(
    connection: Connection, kind: LiteralString, name: str | sql.Composable, comment: str | None
) -> None:
    """Write the comment of an object."""
    written = statement("comment on " + kind + " {} is {}", name, sql.Literal(comment))
    connection.exec_driver_sql(written.as_string(), execution_options=AS_IS)


def quoted(*names: str) -> str:
    """Return a name in SQL, such as a table's with its schema, from its bare parts."""
    return sql.Identifier(*names).as_string()
