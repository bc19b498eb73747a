"""Look-ups: created, listed and dropped, and the columns whose values can be claimed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, Final
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Date, Engine, LargeBinary, Text, Uuid, text
from sqlalchemy.types import TypeEngine

from shardids.catalog.lookups import claims_name, delete_lookup, write_lookup
from shardids.catalog.losses import unsettled
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement, RegisteredLookup
from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.recording import recording
from shardids.models.lookups import Lookup
from shardids.pg.queries import prepare, read
from shardids.pg.schemas import engine_owner, require_own
from shardids.pg.sqlfiles import read_sql

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
    columns: list[str]
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
        """Return why its values can't be claimed, and what helps; ``None`` if they can."""
        faults = (
            (not self.has_table, "the table does not exist", "Create it in every shard: shardids migrate up"),
            (
                self.type is None,
                "the column does not exist",
                f"Its table has: {', '.join(self.columns)}. To add it in every shard: shardids migrate up",
            ),
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
                "no unique index has it as its only column",
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
    """Return what each shard, at its owner, says of the column."""

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
    """Refuse claims that others may change, or of another type than the column, which was altered.

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
    """Refuse shards whose claims, or their functions, belong to other roles: they decide what runs.

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
    """Refuse a column that can't be a look-up key in one of the shards.

    Raises:
        BadArgument: the values can't be claimed there.
        ClusterConflict: a shard is not where the catalog says, or the column's type differs.
    """
    for shard in placement.all_shards():
        where = f'shard {shard} on node "{placement.node_of[shard]}"'
        if shard not in columns:
            raise ClusterConflict(f"{where} does not exist", hint="For the cause: shardids doctor")
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
    """Refuse a look-up whose triggers are missing or disabled in a shard.

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
    """Return the look-up key as a model would define it.

    Raises:
        BadArgument: its values can't be claimed.
    """
    fault = column.fault()
    if fault is not None or column.kind is None:
        raise BadArgument(f"{lookup} can't be a look-up key in shard {column.shard}: {(fault or ('',))[0]}")
    kind, type_ = _KINDS[column.kind]
    return Lookup(table=lookup.table, column=lookup.column, key=lookup.column, kind=kind, type_=type_)


def create(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Make a table for claims and what changes them in every shard, and enters the look-up. Idempotent.

    It is not ready before the rows are claimed: :func:`~shardids.tables.lookups.backfill`. Roles that
    may write the table in a shard may claim for it; to let those of later, call it again.

    Args:
        catalog: the cluster's catalog.
        name: ``table.column``, as in every shard.
        dry_run: do all of it, and roll back.

    Returns:
        The shards that got a table.

    Raises:
        BadArgument: values of the column can't be claimed in some shard; nothing was made.
        ClusterConflict: shards are missing, or being moved.
        MissingPrivilege: the role lacks a privilege; or an object with the name of claims belongs to another
            role than the engine's owner.
    """
    wanted = parsed(name)
    lookup = catalog.lookups().get((wanted.table, wanted.column), wanted)
    placement = catalog.placement()
    _require_all(catalog, placement)
    with Nodes(placement.nodes, catalog.url, application_name="shardids lookup") as nodes:
        columns = shard_columns(nodes, placement, lookup)
        check_columns(columns, placement, lookup)
        check_owners(nodes, placement, columns)
        made = [shard for shard, column in sorted(columns.items()) if not column.has_claims]
        rights = json.dumps(_rights(columns))

        def make(connection: Connection, column: ShardColumn) -> None:
            _run(connection, column, lookup, "lookups/claims.v1", rights=rights, shard_count=1 + max(columns))
            if lookup.is_ready:
                _run(connection, column, lookup, "lookups/guard.v1")

        with _no_moves(catalog), recording(catalog, f"lookup create {lookup}", dry_run=dry_run):
            # First everywhere with ROLLBACK: where one shard refuses, nothing is left in the others.
            for commits in (False,) if dry_run else (False, True):
                _in_shards(nodes, placement, columns, make, commits=commits)
                with catalog.engine.connect() as connection, connection.begin() as transaction:
                    write_lookup(connection, lookup)
                    if not commits:
                        transaction.rollback()
    return made


def guard(
    catalog: Catalog, nodes: Nodes, columns: Mapping[int, ShardColumn], lookup: RegisteredLookup
) -> None:
    """Make the triggers that refuse statements without a claim, where they are missing.

    Raises:
        ClusterConflict: shards are being moved.
    """
    missing = {shard: column for shard, column in columns.items() if not column.is_guarded}
    if missing:
        with _no_moves(catalog):
            _in_shards(
                nodes,
                catalog.placement(),
                missing,
                lambda connection, column: _run(connection, column, lookup, "lookups/guard.v1"),
            )


def _rights(columns: Mapping[int, ShardColumn]) -> dict[str, str]:
    """Return the shards that each role may write to, as PostgreSQL's multiranges of integers."""
    shards: dict[str, list[int]] = {}
    for shard, column in sorted(columns.items()):
        for role in column.writers:
            shards.setdefault(role, []).append(shard)
    return {role: "{" + ",".join(f"[{one},{one}]" for one in some) + "}" for role, some in shards.items()}


def _in_shards(
    nodes: Nodes,
    placement: Placement,
    columns: Mapping[int, ShardColumn],
    change: Callable[[Connection, ShardColumn], object],
    *,
    commits: bool = True,
) -> None:
    """Change each shard in its own transaction, which is rolled back unless it ``commits``."""

    def on_node(name: str, engine: Engine) -> None:
        for shard in placement.by_node()[name]:
            if shard in columns:
                with engine.connect() as connection, connection.begin() as transaction:
                    change(connection, columns[shard])
                    if not commits:
                        transaction.rollback()

    nodes.each(on_node, placement.by_node()).all()


def _run(
    connection: Connection, column: ShardColumn, lookup: RegisteredLookup, file: str, **settings: object
) -> None:
    prepare(
        connection,
        schema=column.schema,
        table=lookup.table,
        column=lookup.column,
        claims=lookup.claims,
        kind=column.kind,
        **settings,
    )
    connection.execution_options(no_parameters=True).exec_driver_sql(read_sql(file))


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Forget a look-up, and drop its claims and triggers; return the shards that had claims.

    Raises:
        ClusterConflict: the look-up does not exist, or shards are being moved.
    """
    lookup = known(catalog, name)
    placement = catalog.placement()
    with Nodes(placement.nodes, catalog.url, application_name="shardids lookup") as nodes:
        columns = shard_columns(nodes, placement, lookup)
        there = [shard for shard, column in sorted(columns.items()) if column.has_claims]
        if dry_run:
            return there
        with _no_moves(catalog), recording(catalog, f"lookup drop {lookup}"):
            with catalog.engine.begin() as connection:
                delete_lookup(connection, lookup)
            _in_shards(
                nodes,
                placement,
                columns,
                lambda connection, column: _run(connection, column, lookup, "lookups/drop.v1"),
            )
    return there


def listed(catalog: Catalog) -> list[dict[str, object]]:
    """Return the look-ups, ready to be shown."""
    return [
        {"lookup": str(one), "ready": one.is_ready, "claims": one.claims}
        for one in catalog.lookups().values()
    ]


def parsed(name: str) -> RegisteredLookup:
    """Return the look-up of a column, ``table.column``, before it is created.

    Raises:
        BadArgument: it is not of this form.
    """
    table, _, column = name.rpartition(".")
    if not (table and column):
        raise BadArgument(f"{name!r} is not of the form TABLE.COLUMN", hint="For example: users.email")
    return RegisteredLookup(table=table, column=column, claims=claims_name(table, column), is_ready=False)


def known(catalog: Catalog, name: str) -> RegisteredLookup:
    """Return a look-up that was created.

    Raises:
        ClusterConflict: the look-up does not exist.
    """
    wanted, lookups = parsed(name), catalog.lookups()
    found = lookups.get((wanted.table, wanted.column))
    if found is None:
        there = ", ".join(map(str, lookups.values())) or "none yet"
        raise ClusterConflict(
            f"look-up {name} does not exist",
            hint=f"Look-ups: {there}. To create it: shardids lookup create {name}",
        )
    return found


def _require_all(catalog: Catalog, placement: Placement) -> None:
    count = catalog.describe().shard_count
    missing: Sequence[int] = sorted(set(range(count)) - set(placement.all_shards()))
    if missing:
        raise ClusterConflict(
            f"{len(missing)} of {count} shards are not created, for example shard {missing[0]}",
            hint="Values are claimed in all of them. To create them: shardids shard create",
        )


@contextmanager
def _no_moves(catalog: Catalog) -> Iterator[None]:
    """Keep moves from beginning while tables are made or dropped, and refuse where one is under way."""
    with catalog.engine.connect() as connection, connection.begin():
        prepare(connection)
        connection.execute(
            text("""
                lock table shardids_catalog.move, shardids_catalog.loss, shardids_catalog.key_move
                in share mode""")
        )
        open_ = unsettled(connection)
        if open_:
            raise ClusterConflict(
                f"shard {open_[0]} is being moved",
                hint="Wait until the move has ended: shardids shard move --list",
            )
        _refuse_key_moves(connection)
        yield


def refuse_key_moves(catalog: Catalog) -> None:
    """Refuse while the rows of a key are on their way to another shard, as they are in both for a time.

    Raises:
        ClusterConflict: a move of a key is not over.
    """
    with catalog.engine.connect() as connection:
        _refuse_key_moves(connection)


def _refuse_key_moves(connection: Connection) -> None:
    key = connection.scalar(
        text("select key from shardids_catalog.key_move where ended_at is null order by id limit 1")
    )
    if key is not None:
        raise ClusterConflict(
            f"the rows of key {key!r} are being moved to another shard",
            hint="Wait until the move has ended: shardids tenant move --list",
        )
