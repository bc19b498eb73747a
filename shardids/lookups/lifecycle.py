"""Creates, lists and drops look-ups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.lookups import claims_name, delete_lookup, write_lookup
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.rows import Catalog
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.topology import Placement, RegisteredLookup
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.lookups import places
from shardids.lookups.columns import (
    ShardColumn,
    check_columns,
    check_owners,
    check_parts,
    check_trust,
    shard_columns,
)
from shardids.views.database import run


def create(
    catalog: Catalog,
    name: str,
    *,
    strict: bool | None = None,
    store_password: bool = False,
    dry_run: bool = False,
) -> list[int]:
    """Makes a table for claims in every shard, and enters the look-up. Calls are idempotent.

    It is not ready before the rows that are there are claimed: :func:`shardids.lookups.backfill`. Roles that
    may read or write the table may read or write claims; to let those of later, call it again.

    Args:
        catalog: the cluster's catalog.
        name: ``table.column``, as in every shard.
        strict: whether triggers claim what any SQL writes; ``None``: as it is.
        store_password: store the nodes' passwords in the user mappings of the triggers.
        dry_run: look at all shards, and make nothing.

    Returns:
        The shards in which a table or triggers were made.

    Raises:
        BadArgument: values of the column can't be claimed in some shard; nothing was made.
        ClusterConflict: shards are missing, or being moved; or triggers can't claim from a node; or what
            has the name of claims belongs to a role that others don't trust.
        MissingPrivilege: the role lacks a privilege, or the triggers need stored passwords.
    """
    lookup, there = parsed(name), _entered(catalog, name)
    lookup = replace(there or lookup, is_strict=bool(there and there.is_strict) if strict is None else strict)
    placement = catalog.placement()
    _require_all(catalog, placement)
    with Nodes(placement.nodes, catalog.url, application_name="shardids lookup") as nodes:
        columns = shard_columns(nodes, placement, lookup)
        check_columns(columns, placement, lookup)
        check_owners(columns, lookup)
        if lookup.is_strict:
            check_parts(columns, lookup)
            check_trust(columns, lookup)
        made = [
            shard
            for shard, column in sorted(columns.items())
            if not column.has_claims or (lookup.is_strict and not column.is_strict)
        ]
        if dry_run:
            return made
        with _no_moves(catalog):

            def make(name: str, engine: Engine) -> None:
                for shard in placement.by_node()[name]:
                    with engine.begin() as connection:
                        _make(connection, columns[shard].schema, lookup)

            nodes.each(make, placement.by_node()).all()
            with catalog.engine.begin() as connection:
                write_lookup(connection, lookup)
            # Triggers come after what they need, and go before it.
            if lookup.is_strict:
                _require_told(places.refresh(catalog, store_password=store_password))
            _set_triggers(nodes, placement, columns, lookup)
            if there and there.is_strict and not lookup.is_strict:
                _require_told(places.refresh(catalog))
    return made


def _entered(catalog: Catalog, name: str) -> RegisteredLookup | None:
    wanted = parsed(name)
    return catalog.lookups().get((wanted.table, wanted.column))


def _require_told(failed: Mapping[str, ShardidsError]) -> None:
    for error in failed.values():
        raise error


def _set_triggers(
    nodes: Nodes, placement: Placement, columns: Mapping[int, ShardColumn], lookup: RegisteredLookup
) -> None:
    """Makes the triggers of a strict look-up in every shard, or drops those of another."""
    add = sql.SQL("select shardids.add_claiming({table}, {key}, {claims}, {kind}, {count})")
    remove = sql.SQL("select shardids.drop_claiming({table}, {claims})")

    def change(name: str, engine: Engine) -> None:
        for shard in placement.by_node()[name]:
            column = columns[shard]
            if not (lookup.is_strict or column.triggers):
                continue
            statement = (add if lookup.is_strict else remove).format(
                table=sql.Literal(sql.Identifier(column.schema, lookup.table).as_string()),
                key=sql.Literal(lookup.column),
                claims=sql.Literal(lookup.claims),
                kind=sql.Literal(column.kind),
                count=sql.Literal(len(columns)),
            )
            with engine.begin() as connection:
                prepare(connection)
                run(connection, [statement])

    nodes.each(change, placement.by_node()).all()


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Forgets a look-up and drops its claims and triggers in every shard; returns the shards that had some.

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
            _set_triggers(nodes, placement, columns, replace(lookup, is_strict=False))
            with catalog.engine.begin() as connection:
                delete_lookup(connection, lookup)
            if lookup.is_strict:
                _require_told(places.refresh(catalog))

            def remove(name: str, engine: Engine) -> None:
                for shard in placement.by_node()[name]:
                    with engine.begin() as connection:
                        prepare(connection)
                        table = sql.Identifier(columns[shard].schema, lookup.claims)
                        connection.execution_options(no_parameters=True).exec_driver_sql(
                            sql.SQL("drop table if exists {}").format(table).as_string()
                        )

            nodes.each(remove, placement.by_node()).all()
    return there


def listed(catalog: Catalog) -> list[dict[str, object]]:
    """Returns the look-ups, ready to be shown."""
    return [
        {"lookup": str(one), "ready": one.is_ready, "strict": one.is_strict, "claims": one.claims}
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


def _make(connection: Connection, schema: str, lookup: RegisteredLookup) -> None:
    prepare(connection, schema=schema, table=lookup.table, column=lookup.column, claims=lookup.claims)
    connection.execution_options(no_parameters=True).exec_driver_sql(read_sql("lookups/claims.v1"))


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
