"""Whether a column's values can be claimed: what each shard says of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any, Final
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Date, Engine, LargeBinary, Text, Uuid
from sqlalchemy.types import TypeEngine

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare, read
from shardids.catalog.schemas import engine_owner, require_own
from shardids.catalog.topology import Placement, RegisteredLookup
from shardids.errors import BadArgument, ClusterConflict
from shardids.models.lookups import Lookup

_KINDS: Final[dict[str, tuple[type, TypeEngine[Any]]]] = {
    "text": (str, Text()),
    "bigint": (int, BigInteger()),
    "uuid": (UUID, Uuid()),
    "bytea": (bytes, LargeBinary()),
    "date": (date, Date()),
}
"""What values are in Python, and their type there, by how ``lookups/column.v1.sql`` calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardColumn:
    """The column in one shard: a row of ``lookups/column.v1.sql``."""

    shard: int
    schema: str
    has_table: bool
    type: str | None
    kind: str | None
    is_deterministic: bool
    is_not_null: bool
    is_filled: bool
    is_unique: bool
    has_claims: bool
    claims_fit: bool
    is_row_secured: bool
    has_column_grants: bool
    writers: list[str]
    is_guarded: bool
    changed: str | None

    def fault(self) -> tuple[str, str] | None:
        """Returns why its values can't be claimed, and what helps; ``None`` if they can."""
        faults = (
            (not self.has_table, "there is no such table", "Create it in every shard: shardids migrate up"),
            (self.type is None, "there is no such column", "Add it in every shard: shardids migrate up"),
            (
                self.kind is None or not self.is_deterministic,
                f"values of type {self.type}, or of its collation, can be equal and differ",
                "Use text of a deterministic collation, an integer, uuid, bytea or date.",
            ),
            (
                not self.is_not_null,
                "it can be NULL, and NULLs are not unique",
                "ALTER TABLE … ALTER COLUMN … SET NOT NULL",
            ),
            (
                self.is_filled,
                "the server makes its values",
                "Sessions claim values before they are committed: drop its default.",
            ),
            (
                not self.is_unique,
                "it has no unique index of its own",
                "ALTER TABLE … ADD UNIQUE (…), not deferrable",
            ),
            (
                self.is_row_secured,
                "its table has row security, which claims would not follow: they tell of rows that it hides",
                "ALTER TABLE … DISABLE ROW LEVEL SECURITY, or find the rows by another key.",
            ),
            (
                self.has_column_grants,
                "privileges on columns of its table were granted, which claims would not follow",
                "REVOKE them, and GRANT on the table.",
            ),
        )
        return next(((what, hint) for is_wrong, what, hint in faults if is_wrong), None)


def shard_columns(nodes: Nodes, placement: Placement, lookup: RegisteredLookup) -> dict[int, ShardColumn]:
    """Returns what each shard, at its owner, says of the column."""

    def ask(_name: str, engine: Engine) -> list[ShardColumn]:
        with engine.connect() as connection:
            return _read(connection, lookup)

    answers = nodes.each(ask).all()
    return {
        column.shard: column
        for name, columns in answers.items()
        for column in columns
        if placement.node_of.get(column.shard) == name
    }


def _read(connection: Connection, lookup: RegisteredLookup) -> list[ShardColumn]:
    return read(
        connection,
        "lookups/column.v1",
        ShardColumn,
        table=lookup.table,
        column=lookup.column,
        claims=lookup.claims,
    )


def check_claims(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses claims that others may change, or of another type than the column, which was altered.

    Raises:
        ClusterConflict: there are some.
    """
    for shard, column in sorted(columns.items()):
        if column.changed:
            raise ClusterConflict(
                f"claims of {lookup} in shard {shard}: {column.changed}",
                hint=f"shardids lookup create {lookup}",
            )
        if column.has_claims and not column.claims_fit:
            raise ClusterConflict(
                f"{lookup} in shard {shard} is now {column.type}, and its claims are of another type or"
                " collation: values that they can't hold are refused",
                hint=f"To alter the claims in every shard: shardids lookup create {lookup}",
            )


def check_owners(nodes: Nodes, placement: Placement, columns: dict[int, ShardColumn]) -> None:
    """Refuses shards whose claims, or their functions, belong to other roles: they decide what runs.

    Raises:
        MissingPrivilege: there are some.
    """

    def check(name: str, engine: Engine) -> None:
        schemas = [columns[shard].schema for shard in placement.by_node()[name] if shard in columns]
        with engine.connect() as connection, connection.begin():
            prepare(connection)
            require_own(connection, schemas, engine_owner(connection))

    nodes.each(check, placement.by_node()).all()


def check_columns(columns: dict[int, ShardColumn], placement: Placement, lookup: RegisteredLookup) -> None:
    """Refuses a column that can't be a look-up key in one of the shards.

    Raises:
        BadArgument: the values can't be claimed there.
        ClusterConflict: a shard is not where the catalog says, or the column's type differs.
    """
    for shard in placement.all_shards():
        where = f'shard {shard} on node "{placement.node_of[shard]}"'
        if shard not in columns:
            raise ClusterConflict(f"{where} is not there", hint="To see what is wrong: shardids doctor")
        fault = columns[shard].fault()
        if fault is not None:
            raise BadArgument(f"{lookup} can't be a look-up key in {where}: {fault[0]}", hint=fault[1])
    types = {column.type for column in columns.values()}
    if len(types) > 1:
        raise ClusterConflict(
            f"{lookup} is of several types: {', '.join(sorted(map(str, types)))}",
            hint="Bring all shards to one revision: shardids migrate up",
        )


def check_guards(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses a look-up whose triggers are missing or disabled in a shard.

    Raises:
        ClusterConflict: they are.
    """
    for shard, column in sorted(columns.items()):
        if lookup.is_ready and not column.is_guarded:
            raise ClusterConflict(
                f"{lookup} in shard {shard}: the trigger that refuses statements without a claim is missing"
                " or disabled",
                hint=f"shardids lookup backfill {lookup}",
            )


def model_of(lookup: RegisteredLookup, column: ShardColumn) -> Lookup:
    """Returns the look-up key as a model would define it.

    Raises:
        BadArgument: its values can't be claimed.
    """
    fault = column.fault()
    if fault is not None or column.kind is None:
        raise BadArgument(f"{lookup} can't be a look-up key in shard {column.shard}: {(fault or ('',))[0]}")
    kind, type_ = _KINDS[column.kind]
    return Lookup(table=lookup.table, column=lookup.column, key=lookup.column, kind=kind, type_=type_)
