"""Whether a column's values can be claimed: what each shard says of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any, Final
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Date, Engine, LargeBinary, Text, Uuid
from sqlalchemy.types import TypeEngine

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import read
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
    has_parts: bool
    triggers: int
    claims_follow: bool
    planted: str | None
    strangers: str | None

    @property
    def is_strict(self) -> bool:
        """Returns whether triggers claim what SQL writes."""
        return self.triggers == 2

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
    """Refuses claims of another type than the column, which was altered.

    Raises:
        ClusterConflict: there are some.
    """
    for shard, column in sorted(columns.items()):
        if column.has_claims and not column.claims_fit:
            raise ClusterConflict(
                f"{lookup} in shard {shard} is now {column.type}, and its claims are of another type or"
                " collation: values that they can't hold are refused",
                hint=f"To alter the claims in every shard: shardids lookup create {lookup}",
            )


def check_owners(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses claims that a role owns whom others don't trust: its defaults and triggers run when they claim.

    Raises:
        ClusterConflict: there are some.
    """
    for shard, column in sorted(columns.items()):
        if column.planted:
            raise ClusterConflict(
                f"claims of {lookup} in shard {shard}: {column.planted}, which decides what runs when others"
                " claim",
                hint="DROP it and create the look-up again; or, when you have seen that it has no defaults,"
                " constraints, rules or triggers of others: ALTER TABLE … OWNER TO the table's owner.",
            )


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


def check_strict(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses a strict look-up whose triggers are missing or disabled in a shard, or not to be trusted.

    Raises:
        BadArgument: the table is partitioned or inherited.
        ClusterConflict: triggers are missing, or others can have triggers there.
    """
    if not lookup.is_strict:
        return
    check_parts(columns, lookup)
    check_trust(columns, lookup)
    for shard, column in sorted(columns.items()):
        if not column.is_strict:
            raise ClusterConflict(
                f"{lookup} is strict, and in shard {shard} triggers that claim are missing or disabled: what"
                " SQL writes is not claimed",
                hint=f"shardids lookup create {lookup} --strict, then: shardids lookup backfill {lookup}",
            )
        if not column.claims_follow:
            raise ClusterConflict(
                f"{lookup} is strict, and in shard {shard} its claims have another owner than its table",
                hint=f"shardids lookup create {lookup} --strict",
            )


def check_trust(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses a table on which others than the engine's owner and superusers can have triggers.

    The triggers of a strict look-up write it, and its claims, as the user of the node's URL.

    Raises:
        ClusterConflict: it is one.
    """
    for shard, column in sorted(columns.items()):
        if column.strangers:
            raise ClusterConflict(
                f"{lookup} can't be strict in shard {shard}: {column.strangers}; their triggers would run as"
                " the user of the node's URL",
                hint="Let the owner of schema shardids own the table, its schema and the functions of its"
                " triggers; REVOKE TRIGGER, and REFERENCES on claims; DROP what is on claims. Or without:"
                " --no-strict",
            )


def check_parts(columns: dict[int, ShardColumn], lookup: RegisteredLookup) -> None:
    """Refuses a partitioned or inherited table, whose parts are written without triggers of the whole.

    Raises:
        BadArgument: it is one.
    """
    for shard, column in sorted(columns.items()):
        if column.has_parts:
            raise BadArgument(
                f"{lookup} can't be strict in shard {shard}: {lookup.table} is partitioned or inherited, and"
                " who writes to a part does not fire the triggers of the table",
                hint="Sessions claim without: shardids lookup create, without --strict.",
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
