"""How tables of a source are made: what tables like them are to have in the shards and on the nodes.

Names are quoted where SQL needs it, unless said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from shardids.catalog.queries import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. Names of types, collations and sequences have schemas unless they are PostgreSQL's own.

    Attributes:
        name: bare, as in ``pg_attribute``; ``sql``: quoted where SQL needs it.
        is_narrow: it is an integer that has no room for an ID of a shard.
        not_null: no row has NULL there.
        generated: ``s`` if it is generated and stored, ``v`` if it is virtual, else nothing.
        sequences: what its default or its identity draws from.
        collation, storage, compression, statistics: where they differ from those of its type.
    """

    name: str
    sql: str
    type: str
    is_narrow: bool
    not_null: bool
    default: str | None
    generated: str
    is_identity: bool
    sequences: tuple[str, ...]
    collation: str | None
    storage: str | None
    compression: str | None
    statistics: int | None
    comment: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint. ``kind``: as in ``pg_constraint.contype``. Names of columns are bare."""

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
    """An index that is of no constraint. ``definition``: the statement that makes it."""

    name: str
    definition: str
    is_valid: bool
    comment: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A privilege on a table, or on a column of it. ``role`` is ``None`` for every role."""

    role: str | None
    privilege: str
    column: str | None
    may_grant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence that columns of a table draw from. ``owner``: the column of the table that it belongs to."""

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
class Structure:
    """A table. ``name``: with the schema, as it was asked for; ``options``: storage parameters."""

    name: str
    schema: str
    table: str
    comment: str | None
    options: tuple[str, ...]
    has_row_security: bool
    is_partitioned: bool
    columns: Mapping[str, Column]
    constraints: tuple[Constraint, ...]
    indexes: tuple[Index, ...]
    grants: tuple[Grant, ...]
    sequences: tuple[Sequence, ...]

    @property
    def qualified(self) -> str:
        """Returns its name with the schema."""
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """An enum (``kind`` ``e``, with ``labels``) or a domain (``d``, of type ``base``)."""

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


def read_structures(connection: Connection, names: Iterable[str]) -> dict[str, Structure]:
    """Reads the tables of these names, in a transaction of its own; those that are not there are left out."""
    rows = read(connection, "adopt/structure.v1", dict[str, Any], names=json.dumps(sorted(names)))
    return {row["name"]: _structure(row) for row in rows}


def read_types(connection: Connection, names: Iterable[str]) -> list[Type]:
    """Reads the enums and domains of these tables' columns, in an order in which they can be made."""
    rows = read(connection, "adopt/types.v1", dict[str, Any], names=json.dumps(sorted(names)))
    return [Type(**row | {"labels": tuple(row["labels"]), "checks": tuple(row["checks"])}) for row in rows]


def _structure(row: dict[str, Any]) -> Structure:
    return Structure(
        **row
        | {
            "options": tuple(row["options"]),
            "columns": {
                one["name"]: Column(**one | {"sequences": tuple(one["sequences"])}) for one in row["columns"]
            },
            "constraints": tuple(
                Constraint(
                    **one
                    | {
                        "columns": tuple(one["columns"] or ()),
                        "referenced_columns": tuple(one["referenced_columns"] or ()),
                    }
                )
                for one in row["constraints"]
            ),
            "indexes": tuple(Index(**one) for one in row["indexes"]),
            "grants": _grants(row["grants"]),
            "sequences": tuple(
                Sequence(**one | {"grants": _grants(one["grants"])}) for one in row["sequences"]
            ),
        }
    )


def _grants(found: Iterable[dict[str, Any]]) -> tuple[Grant, ...]:
    return tuple(Grant(**one) for one in found)
