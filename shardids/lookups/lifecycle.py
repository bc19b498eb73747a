"""Creates, lists and drops look-ups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text

from shardids.catalog.lookups import claims_name, delete_lookup, write_lookup
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.rows import Catalog
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.topology import Placement, RegisteredLookup
from shardids.errors import BadArgument, ClusterConflict
from shardids.lookups.columns import ShardColumn, check_columns, check_owners, shard_columns


def create(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Makes a table for claims and what changes them in every shard, and enters the look-up. Idempotent.

    It is not ready before the rows that are there are claimed: :func:`shardids.lookups.backfill`. Roles that
    may write the table in a shard may claim for it; to let those of later, call it again.

    Args:
        catalog: the cluster's catalog.
        name: ``table.column``, as in every shard.
        dry_run: do all of it, and roll back.

    Returns:
        The shards in which a table was made.

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
            _run(connection, column, lookup, "lookups/claims.v1", rights=rights, shard_count=len(columns))
            if lookup.is_ready:
                _run(connection, column, lookup, "lookups/guard.v1")

        with _no_moves(catalog):
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
    """Makes the triggers that refuse statements without a claim, where they are missing.

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
    """Returns the shards in which each role may write, as PostgreSQL's multiranges of integers."""
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
    """Forgets a look-up, and drops its claims and triggers; returns the shards that had claims.

    Raises:
        ClusterConflict: there is no such look-up, or shards are being moved.
    """
    lookup = known(catalog, name)
    placement = catalog.placement()
    with Nodes(placement.nodes, catalog.url, application_name="shardids lookup") as nodes:
        columns = shard_columns(nodes, placement, lookup)
        there = [shard for shard, column in sorted(columns.items()) if column.has_claims]
        if dry_run:
            return there
        with _no_moves(catalog):
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
    """Returns the look-ups, ready to be shown."""
    return [
        {"lookup": str(one), "ready": one.is_ready, "claims": one.claims}
        for one in catalog.lookups().values()
    ]


def parsed(name: str) -> RegisteredLookup:
    """Returns the look-up of a column, ``table.column``, before it is created.

    Raises:
        BadArgument: it is not of this form.
    """
    table, _, column = name.rpartition(".")
    if not (table and column):
        raise BadArgument(f"{name!r} names no column", hint="TABLE.COLUMN, such as users.email")
    return RegisteredLookup(table=table, column=column, claims=claims_name(table, column), is_ready=False)


def known(catalog: Catalog, name: str) -> RegisteredLookup:
    """Returns a look-up that was created.

    Raises:
        ClusterConflict: there is no such look-up.
    """
    wanted, lookups = parsed(name), catalog.lookups()
    found = lookups.get((wanted.table, wanted.column))
    if found is None:
        there = ", ".join(map(str, lookups.values())) or "none yet"
        raise ClusterConflict(
            f"there is no look-up {name}",
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
    """Keeps moves from beginning while tables are made or dropped, and refuses where one is under way."""
    with catalog.engine.connect() as connection, connection.begin():
        prepare(connection)
        connection.execute(text("lock table shardids_catalog.move in share mode"))
        open_ = connection.scalars(
            text("select shard from shardids_catalog.move where ended_at is null order by shard")
        ).all()
        if open_:
            raise ClusterConflict(
                f"shard {open_[0]} is being moved", hint="When that has ended: shardids shard moves"
            )
        yield
