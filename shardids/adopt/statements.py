"""Parts of the statements that read a source's tables: joins along foreign keys, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.adopt.inventory import ForeignKey, Inventory, Table
from shardids.adopt.paths import Sorted, Way

SAMPLE_ROWS: Final = 100_000
"""How many rows of a table are read; of a larger one blocks are chosen at random, about as many rows."""


class Joins:
    """The tables that a statement joins to ``t0``, each to what it refers to: at most one row."""

    def __init__(self) -> None:
        self._joins: list[sql.Composable] = []

    def key_of(self, way: Way) -> sql.Composable:
        """Returns the key of ``t0``'s row, and joins what leads to it."""
        return self._follow(way.path, way.key)

    def key_beyond(self, foreign_key: ForeignKey, parent: Way) -> sql.Composable:
        """Returns the key of the row that a foreign key of ``t0`` refers to, and joins what leads to it."""
        return self._follow((foreign_key, *parent.path), parent.key)

    def text(self) -> sql.Composable:
        """Returns the joins."""
        return sql.SQL("").join(self._joins)

    def _follow(self, path: Sequence[ForeignKey], key: str) -> sql.Composable:
        alias = sql.SQL("t0")
        for foreign_key in path:
            last, alias = alias, sql.SQL(f"t{len(self._joins) + 1}")
            equal = sql.SQL(" and ").join(
                sql.SQL("{}.{} = {}.{}").format(alias, sql.Identifier(theirs), last, sql.Identifier(own))
                for own, theirs in zip(foreign_key.columns, foreign_key.referenced, strict=True)
            )
            joined = named(foreign_key.referenced_table)
            self._joins.append(sql.SQL(" left join {} {} on {}").format(joined, alias, equal))
        return sql.SQL("{}.{}").format(alias, sql.Identifier(key))


def unreadable(inventory: Inventory, sorted_: Sorted, name: str) -> str:
    """Returns why a table's rows can't be read along its foreign keys, or nothing."""
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
    """Returns whether a table is too large for all of its rows to be read."""
    return table.rows > sample_rows


def sampled(table: Table, sample_rows: int) -> sql.Composable:
    """Returns which blocks of a table to read: the same each time, all of one that is not too large."""
    if not is_sampled(table, sample_rows):
        return sql.SQL("")
    percent = sql.Literal(100 * sample_rows / table.rows)
    return sql.SQL(" tablesample system ({}) repeatable (1)").format(percent)


def named(name: str) -> sql.Composable:
    """Returns a table's name, which the server itself has quoted."""
    return sql.SQL(name)


def only_row(connection: Connection, statement: sql.Composable) -> tuple[Any, ...]:
    """Runs a statement that returns one row."""
    # Without parameters a % in a name is not a placeholder.
    unread = connection.execution_options(no_parameters=True)
    return tuple(unread.exec_driver_sql(statement.as_string()).one())
