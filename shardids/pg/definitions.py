"""Definitions of tables of any database: columns, constraints, indexes, replica identity, privileges.

Names are bare, as in the server's catalogs, unless said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from shardids.pg.queries import AS_IS, prepare, rows
from shardids.pg.sqlfiles import read_sql

_FAMILIES: Final = {
    "int2": "integer",
    "int4": "integer",
    "int8": "integer",
    "text": "text",
    "varchar": "text",
    "uuid": "uuid",
}
KEY_TYPES: Final = ("smallint", "integer", "bigint", "text", "character varying", "uuid")
"""The types that a sharding key may have, without their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. Names of types, collations and sequences have schemas unless they are PostgreSQL's own.

    Fields from ``sql`` on are read for whole definitions only; ``sequences`` also for an inventory.

    Attributes:
        builtin_type: its type's name in ``pg_catalog``; ``None`` for domains, enums, arrays and types of
            extensions.
        not_null: no new row may have NULL there; ``never_null``: no row has.
        generated: ``s`` if it is generated and stored, ``v`` if it is virtual, else nothing.
        is_deterministic: equal values are equal bytes.
        set_null_by: the foreign key that sets it NULL when the row that it refers to is deleted.
        short_type: the type without schema and length; ``labels``: those of an enum.
        sql: its name as SQL writes it, in quotes where it needs them.
        sequences: what its default or its identity draws from.
        collation, storage, compression, statistics: where they differ from those of its type.
    """

    name: str
    type: str
    builtin_type: str | None
    not_null: bool
    generated: str = ""
    is_deterministic: bool = True
    short_type: str = ""
    labels: tuple[str, ...] | None = None
    is_identity: bool = False
    set_null_by: str | None = None
    default: str | None = None
    sequences: tuple[str, ...] = ()
    sql: str = ""
    never_null: bool = False
    collation: str | None = None
    storage: str | None = None
    compression: str | None = None
    statistics: int | None = None
    comment: str | None = None

    @property
    def family(self) -> str | None:
        """Returns how its values are hashed as keys: ``integer``, ``text`` or ``uuid``; ``None`` if not."""
        return _FAMILIES.get(self.builtin_type or "") if self.is_deterministic else None

    @property
    def is_narrow(self) -> bool:
        """Returns whether it is an integer that has no room for an ID of a shard."""
        return self.builtin_type in ("int2", "int4")

    @property
    def is_drawn(self) -> bool:
        """Returns whether a new row that brings no value gets one: by a default, or as an identity."""
        return (
            self.is_identity or bool(self.sequences) or (self.default is not None and not self.is_generated)
        )

    @property
    def is_generated(self) -> bool:
        """Returns whether its values are computed."""
        return bool(self.generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint. ``kind``: as in ``pg_constraint.contype``. Other names than of columns are SQL."""

    name: str
    kind: str
    definition: str
    is_valid: bool
    columns: tuple[str, ...]
    referenced: str | None
    referenced_columns: tuple[str, ...]
    comment: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index that is of no constraint; ``name``: SQL. ``definition``: the statement that makes it."""

    name: str
    definition: str
    is_valid: bool
    comment: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A privilege on a table, or on a column of it; names are SQL. ``role``: ``None`` for every role."""

    role: str | None
    privilege: str
    column: str | None
    may_grant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence that columns of a table draw from; names are SQL.

    ``owner``: the column of the table that it belongs to, bare.
    """

    schema: str
    name: str
    type: str
    start: int
    increment: int
    least: int
    greatest: int
    cache: int
    cycles: bool
    comment: str | None
    owner: str | None
    grants: tuple[Grant, ...]

    @property
    def qualified(self) -> str:
        """Returns its name with the schema."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A table.

    Attributes:
        name: its name as it was asked for, with the schema; SQL.
        schema, table: the same, bare; ``schema_sql``, ``table_sql``: each as SQL writes it.
        kind, persistence: ``relkind`` and ``relpersistence``; ``u`` if a partition is unlogged.
        has_foreign_parts: it is a foreign table, or one of its partitions is.
        is_inherited: it inherits, or is inherited by another table or partitioned one.
        is_own: the role may do what its owner, and the owner of each partition, may.
        hides_rows: row security hides rows from the role.
        subscriptions: those that write to it or to a partition; SQL.
        parts: the table and its partitions, each by its name in SQL; ``oids``: of the same.
        storage_version: a text that is another once rows may have changed without an entry in the log that
            logical replication reads: a column's values were computed anew, or a partition was truncated,
            written anew, or detached and attached again.
        identity: the columns that are logged of a row that is updated or deleted, and that find it;
            ``None``: all. Of a partitioned table those that all of its partitions log, if they are unique.
        identity_index: the index that is its replica identity, if one is; SQL.
        has_full_identity: all columns of the table, or of one of its partitions, are.
        primary_key: its columns; empty without one, or with one that is deferrable.
        options: storage parameters. These, and what follows, are of whole definitions only.
    """

    name: str
    schema: str
    table: str
    schema_sql: str
    table_sql: str
    kind: str
    persistence: str
    has_foreign_parts: bool
    is_inherited: bool
    is_own: bool
    hides_rows: bool
    subscriptions: tuple[str, ...]
    parts: tuple[str, ...]
    oids: tuple[int, ...]
    storage_version: str
    identity: tuple[str, ...] | None
    identity_index: str | None
    has_full_identity: bool
    columns: Mapping[str, Column]
    primary_key: tuple[str, ...]
    has_deferrable_key: bool
    has_row_security: bool
    comment: str | None
    options: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    indexes: tuple[Index, ...]
    grants: tuple[Grant, ...]
    sequences: tuple[Sequence, ...]

    @property
    def qualified(self) -> str:
        """Returns its name with the schema; SQL."""
        return f"{self.schema_sql}.{self.table_sql}"

    @property
    def stored(self) -> tuple[Column, ...]:
        """Returns the columns that are not generated: those that are replicated."""
        return tuple(column for column in self.columns.values() if not column.is_generated)

    def shape(self) -> str:
        """Return the definitions that decide how replication brings a row, as text for comparison.

        Another table of the same name, or another partition, has another shape.
        """
        columns = [[c.name, c.type, c.labels, c.not_null, c.is_generated] for c in self.columns.values()]
        identity = None if self.identity is None else sorted(self.identity)
        return json.dumps([self.kind, self.persistence, identity, list(self.parts), list(self.oids), columns])


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """An enum (``kind`` ``e``, with ``labels``) or a domain (``d``, of type ``base``); names are SQL."""

    name: str
    schema: str
    kind: str
    labels: tuple[str, ...]
    base: str
    not_null: bool
    default: str | None
    collation: str | None
    checks: tuple[str, ...]
    comment: str | None


def read_definitions(
    connection: Connection, names: Iterable[str], *, is_whole: bool = False
) -> dict[str, Definition]:
    """Read the tables of these names, in a separate transaction; missing ones are left out.

    ``is_whole``: with all that is needed to make tables like them.
    """
    with connection.begin():
        prepare(connection)
        return definitions_in(connection, names, is_whole=is_whole)


def definitions_in(
    connection: Connection, names: Iterable[str], *, is_whole: bool = False
) -> dict[str, Definition]:
    """Read the tables as :func:`read_definitions` does, in the open transaction."""
    connection.exec_driver_sql(
        "select set_config('shardids.names', %s, true), set_config('shardids.is_whole', %s, true)",
        (json.dumps(sorted(names)), str(is_whole).lower()),
    )
    found = rows(connection, read_sql("reading/definitions.v1"), dict[str, Any])
    return {row["name"]: Definition(**_frozen(row)) for row in found}


def read_types(connection: Connection, names: Iterable[str]) -> list[Type]:
    """Read the enums and domains of these tables' columns, in an order for making them."""
    with connection.begin():
        prepare(connection, names=json.dumps(sorted(names)))
        found = rows(connection, read_sql("reading/types.v1"), dict[str, Any])
    return [Type(**_frozen(row)) for row in found]


_PARTS: Final = {"constraints": Constraint, "indexes": Index, "grants": Grant, "sequences": Sequence}


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row as dataclasses have them: tuples, and parts of a table by their class."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            parts = [(_PARTS.get(name) or Column)(**_frozen(part)) for part in value]
            fields[name] = {part.name: part for part in parts} if name == "columns" else tuple(parts)
        elif isinstance(value, list):
            fields[name] = {} if name == "columns" and "parts" in row else tuple(value)
        else:
            fields[name] = value
    return fields


def has_rows(connection: Connection, name: str) -> bool:
    """Return whether a table, named in SQL, has rows."""
    found: bool = connection.exec_driver_sql(
        f"select exists (select from {name})",  # noqa: S608 -- quoted
        execution_options=AS_IS,
    ).scalar_one()
    return found
