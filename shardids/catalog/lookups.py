"""Look-ups in the catalog, and which shard keeps the claim of a value."""

from __future__ import annotations

from datetime import date
from hashlib import sha256
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.topology import RegisteredLookup, shard_for_key

PREFIX: Final = "shardids_lookup_"
"""How the names of tables with claims begin."""
_LONGEST: Final = 58
"""PostgreSQL cuts names off after 63 bytes, and the primary key's has five more."""

Value = int | str | bytes | UUID | date
"""What a look-up key can be in the database."""


def claims_name(table: str, column: str) -> str:
    """Returns the name of the table with the claims of a column's values, as it is in every shard."""
    name = f"{PREFIX}{table}_{column}"
    if len(name.encode()) <= _LONGEST:
        return name
    return PREFIX + sha256(f"{table}.{column}".encode()).hexdigest()[:32]


def shard_of_claim(value: Value, shard_count: int) -> int:
    """Returns the shard that keeps the claim of a value: by its hash, as :func:`shard_for_key` has it."""
    return shard_for_key(value.isoformat() if isinstance(value, date) else value, shard_count)


def write_lookup(connection: Connection, lookup: RegisteredLookup) -> None:
    """Enters a look-up, or whether it is ready."""
    connection.execute(
        text("""
            insert into shardids_catalog.lookup (table_name, column_name, claims, is_ready)
            values (:table, :column, :claims, :is_ready)
            on conflict (table_name, column_name) do update set is_ready = excluded.is_ready"""),
        {
            "table": lookup.table,
            "column": lookup.column,
            "claims": lookup.claims,
            "is_ready": lookup.is_ready,
        },
    )


def delete_lookup(connection: Connection, lookup: RegisteredLookup) -> None:
    """Deletes a look-up."""
    connection.execute(
        text("delete from shardids_catalog.lookup where table_name = :table and column_name = :column"),
        {"table": lookup.table, "column": lookup.column},
    )
