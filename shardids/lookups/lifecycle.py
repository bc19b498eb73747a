"""Creates, lists and drops look-ups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.lookups import claims_name, delete_lookup, write_lookup
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.rows import Catalog
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.topology import Placement, RegisteredLookup
from shardids.errors import BadArgument, ClusterConflict
from shardids.lookups.columns import check_columns, shard_columns


def create(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Makes a table for claims in every shard, and enters the look-up. Calls are idempotent.

    It is not ready before the rows that are there are claimed: :func:`shardids.lookups.backfill`. Roles that
    may read or write the table may read or write claims; to let those of later, call it again.

    Args:
        catalog: the cluster's catalog.
        name: ``table.column``, as in every shard.
        dry_run: look at all shards, and make nothing.

    Returns:
        The shards in which a table was made.

    Raises:
        BadArgument: values of the column can't be claimed in some shard; nothing was made.
        ClusterConflict: shards are missing, or being moved.
    """
    lookup = parsed(name)
    placement = catalog.placement()
    _require_all(catalog, placement)
    with Nodes(placement.nodes, catalog.url, application_name="shardids lookup") as nodes:
        columns = shard_columns(nodes, placement, lookup)
        check_columns(columns, placement, lookup)
        made = [shard for shard, column in sorted(columns.items()) if not column.has_claims]
        if dry_run:
            return made
        with _no_moves(catalog):

            def make(name: str, engine: Engine) -> None:
                for shard in placement.by_node()[name]:
                    with engine.begin() as connection:
                        _make(connection, columns[shard].schema, lookup)

            nodes.each(make, placement.by_node()).all()
            there = catalog.lookups().get((lookup.table, lookup.column))
            if there is None:
                with catalog.engine.begin() as connection:
                    write_lookup(connection, lookup)
    return made


def drop(catalog: Catalog, name: str, *, dry_run: bool = False) -> list[int]:
    """Forgets a look-up and drops its claims in every shard; returns the shards that had some.

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
