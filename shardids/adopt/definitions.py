"""What an adoption has to know of a table, at the source and on the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.catalog.queries import read, rows
from shardids.catalog.sqlfiles import read_sql


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. ``type`` has the schema where it is not PostgreSQL's own; ``labels`` are those of an enum."""

    name: str
    type: str
    short_type: str
    labels: tuple[str, ...] | None
    not_null: bool
    is_generated: bool
    is_identity: bool
    is_deterministic: bool
    default: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A table.

    Attributes:
        name: its name as it was asked for, with the schema; SQL.
        schema, table: the same, bare.
        kind, persistence: ``relkind`` and ``relpersistence`` of ``pg_class``.
        is_inherited: it inherits, or is inherited by another table or partitioned one.
        is_own: the role may do what its owner may.
        parts: the table and its partitions, each by its name in SQL.
        identity: the columns that are logged of a row that is updated or deleted; ``None``: all.
        has_full_identity: all columns of the table, or of one of its partitions, are.
        has_toast: large values may be stored apart; an update that leaves one as it is does not log it.
        primary_key: its columns, none if there is none.
    """

    name: str
    schema: str
    table: str
    kind: str
    persistence: str
    is_inherited: bool
    is_own: bool
    parts: tuple[str, ...]
    identity: tuple[str, ...] | None
    has_full_identity: bool
    has_toast: bool
    columns: Mapping[str, Column]
    primary_key: tuple[str, ...]

    @property
    def stored(self) -> tuple[Column, ...]:
        """Returns the columns that are not generated: those that are replicated."""
        return tuple(column for column in self.columns.values() if not column.is_generated)

    def shape(self) -> str:
        """Returns what must not change during an adoption, as text that can be compared."""
        columns = [[c.name, c.type, c.labels, c.not_null, c.is_generated] for c in self.columns.values()]
        identity = None if self.identity is None else sorted(self.identity)
        return json.dumps([self.kind, self.persistence, identity, list(self.parts), columns])


AS_IS: Final = {"no_parameters": True}
"""For statements without parameters: a % in a name is not a placeholder."""


def has_rows(connection: Connection, name: str) -> bool:
    """Returns whether a table, named in SQL, has rows."""
    found: bool = connection.exec_driver_sql(
        f"select exists (select from {name})",  # noqa: S608 -- quoted
        execution_options=AS_IS,
    ).scalar_one()
    return found


def qualified(schema: str, table: str) -> str:
    """Returns a table's name with its schema in SQL."""
    return sql.Identifier(schema, table).as_string()


def read_definitions(connection: Connection, names: Iterable[str]) -> dict[str, Definition]:
    """Reads the tables of these names, in a transaction of its own; those that are not there are left out."""
    found = read(connection, "adopt/definitions.v1", dict[str, Any], names=json.dumps(sorted(names)))
    return {row["name"]: _definition(row) for row in found}


def definitions_in(connection: Connection, names: Iterable[str]) -> dict[str, Definition]:
    """Reads the tables as :func:`read_definitions` does, in the open transaction."""
    value = json.dumps(sorted(names))
    connection.exec_driver_sql("select set_config('shardids.names', %s, true)", (value,))
    found = rows(connection, read_sql("adopt/definitions.v1"), dict[str, Any])
    return {row["name"]: _definition(row) for row in found}


def _definition(row: dict[str, Any]) -> Definition:
    columns = {
        entry["name"]: Column(**entry | {"labels": entry["labels"] and tuple(entry["labels"])})
        for entry in row["columns"]
    }
    identity = row["identity"]
    return Definition(
        **row
        | {
            "columns": columns,
            "parts": tuple(row["parts"]),
            "identity": identity if identity is None else tuple(identity),
            "primary_key": tuple(row["primary_key"]),
        }
    )
