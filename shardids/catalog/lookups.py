"""Look-ups in the catalog: the shard that keeps the claim of a value, and the statements that claim it.

The order of these statements in a session makes values unique: ``docs/decisions/0035-unique-over-shards.md``.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from functools import lru_cache
from hashlib import sha256
from typing import Final
from uuid import UUID

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.topology import RegisteredLookup, shard_for_key

PREFIX: Final = "shardids_lookup_"
"""How the names of tables with claims begin."""
_LONGEST: Final = 58
"""PostgreSQL cuts names off after 63 bytes, and the primary key's has five more."""

Value = int | str | bytes | UUID | date
"""The types of a look-up key in the database."""


def claims_name(table: str, column: str) -> str:
    """Return the name of the table with the claims of a column's values, as it is in every shard."""
    name = f"{PREFIX}{table}_{column}"
    if len(name.encode()) <= _LONGEST:
        return name
    return PREFIX + sha256(f"{table}.{column}".encode()).hexdigest()[:32]


def shard_of_claim(value: Value, shard_count: int) -> int:
    """Return the shard that keeps the claim of a value: by its hash, as :func:`shard_for_key` has it."""
    return shard_for_key(value.isoformat() if isinstance(value, date) else value, shard_count)


def write_lookup(connection: Connection, lookup: RegisteredLookup) -> None:
    """Enter a look-up, or whether it is ready."""
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
    """Delete a look-up."""
    connection.execute(
        text("delete from shardids_catalog.lookup where table_name = :table and column_name = :column"),
        {"table": lookup.table, "column": lookup.column},
    )


SQL_TYPES: Final = {"int": "bigint", "str": "text", "bytes": "bytea", "UUID": "uuid", "date": "date"}
"""The SQL type of values that are sent, by the name of their kind in Python."""

MARK: Final = "/* shardids claims */ "
"""How a statement begins whose writes of look-up keys are claimed: ``lookups/guard.v1.sql`` lets it pass."""

# A claim must be on disk before the row is, whatever the server's default is.
_DURABLE: Final = sql.SQL(
    "case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')"
    " then pg_catalog.set_config('synchronous_commit', 'on', true) end"
)


@lru_cache(10_000)
def claim(schema: str, claims: str, type_: str) -> str:
    """Claim values for shards, and return those that no other shard has.

    Parameters: the values, their shards.
    """
    return _text(
        sql.SQL("select c, {durable} from {claim}(%s::{type}[], %s::integer[]) c").format(
            claim=_named(schema, claims), type=sql.SQL(type_), durable=_DURABLE
        )
    )


def claim_in(schemas: Collection[str], claims: str, type_: str) -> str:
    """:func:`claim` in several shards of a node, in one transaction. Parameters: those of each in turn."""
    if len(schemas) == 1:
        return claim(next(iter(schemas)), claims, type_)
    # Of texts that are kept: to compose 32 of them takes a millisecond.
    return " union all ".join(claim(schema, claims, type_) for schema in schemas)


def find_in(schemas: Collection[str], claims: str, type_: str) -> str:
    """Return values with the shards that they are claimed for, and the claims' stamps.

    Parameters: the values of each schema in turn.
    """
    return " union all ".join(_find(schema, claims, type_) for schema in schemas)


@lru_cache(10_000)
def _find(schema: str, claims: str, type_: str) -> str:
    return _text(
        sql.SQL("select value, shard, stamp from {} where value = any (%s::{}[])").format(
            _named(schema, claims), sql.SQL(type_)
        )
    )


def take(schema: str, claims: str, type_: str) -> str:
    """Take claims from shards that have no row, if nobody has claimed since they were read.

    Parameters: the values, the stamps that were read, the shards that they are for; NULL gives them up.
    """
    return _text(
        sql.SQL("select c, {durable} from {take}(%s::{type}[], %s::uuid[], %s::integer[]) c").format(
            take=_named(schema, claims), type=sql.SQL(type_), durable=_DURABLE
        )
    )


def wait_for_writers(schema: str, table: str, column: str, *, lock_ms: int) -> str:
    """Wait, in a transaction, until everybody who has written to a table has committed or not.

    The UPDATE changes nothing: the write barrier of a shard that has moved refuses it.
    """
    there = _named(schema, table)
    return _text(
        sql.SQL(
            "{mark}begin isolation level read committed; set local row_security = off;"
            " set local lock_timeout = {lock_ms};"
            " lock table {there} in share mode; update {there} set {column} = {column} where false"
        ).format(mark=sql.SQL(MARK), lock_ms=sql.Literal(f"{lock_ms}ms"), there=there, column=_named(column))
    )


def wait_without_writing(shard: int, schema: str, table: str, *, lock_ms: int) -> str:
    """Wait as :func:`wait_for_writers` does, in an open transaction that may be READ ONLY.

    It runs no code of the table's owner: no statement is planned over the table, and none fires its triggers.
    """
    there = sql.Identifier(schema, table)
    return _text(
        sql.SQL(
            "set local lock_timeout = {lock_ms}; lock table {there} in share mode;"
            " select shardids.pass_barrier({shard}, {name}::pg_catalog.regclass)"
        ).format(
            lock_ms=sql.Literal(f"{lock_ms}ms"),
            there=there,
            shard=sql.Literal(shard),
            name=sql.Literal(there.as_string()),
        )
    )


def in_the_way(schema: str, table: str) -> str:
    """Return the process IDs of those whom :func:`wait_for_writers` waits for; NULL: prepared ones."""
    return _text(
        sql.SQL(
            "select distinct pid from pg_catalog.pg_locks where granted"
            " and mode not in ('AccessShareLock', 'RowShareLock', 'ShareLock')"
            " and relation = pg_catalog.to_regclass({there}) and database = (select oid from"
            " pg_catalog.pg_database where datname = pg_catalog.current_database()) order by 1"
        ).format(there=sql.Literal(_named(schema, table).as_string()))
    )


def rows_in(schema: str, table: str, column: str, type_: str) -> str:
    """Return those of the values that rows have. Parameters: the values."""
    return _text(
        sql.SQL("select {column} from {there} where {column} = any (%s::{type}[])").format(
            column=_named(column), there=_named(schema, table), type=sql.SQL(type_)
        )
    )


def page_of_rows(schema: str, table: str, column: str, type_: str, *, after: bool) -> str:
    """Return the next values of a table's column. Parameters: the value ``after`` which, how many."""
    return _text(
        sql.SQL("select {column} from {there} {after} order by {column} limit %s").format(
            column=_named(column), there=_named(schema, table), after=_after(column, type_, after=after)
        )
    )


def page_of_claims(schema: str, claims: str, type_: str, *, after: bool) -> str:
    """Return the next claims: value, shard, stamp. Parameters: the value ``after`` which, how many."""
    return _text(
        sql.SQL("select value, shard, stamp from {there} {after} order by value limit %s").format(
            there=_named(schema, claims), after=_after("value", type_, after=after)
        )
    )


def _after(column: str, type_: str, *, after: bool) -> sql.Composable:
    if not after:
        return sql.SQL("")
    return sql.SQL("where {} > %s::{}").format(_named(column), sql.SQL(type_))


Stamped = tuple[int, UUID]
"""The shard that a value is claimed for, and the claim's stamp."""


def _named(*names: str) -> sql.Identifier:
    # Of a statement with parameters, where a % in a name would begin one.
    return sql.Identifier(*(name.replace("%", "%%") for name in names))


def _text(composed: sql.Composable) -> str:
    return composed.as_string()
