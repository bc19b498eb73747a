"""The source of an adoption and the nodes that take it in: connections, names, and where each table goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids.adopt.definitions import Definition, qualified, read_definitions
from shardids.adopt.filters import family_of, hashed_shard, row_filter, staged_shard
from shardids.adopt.plan import Kind, Plan, TablePlan
from shardids.catalog.connections import keep_commits, keep_settings, parse_url, with_password_of
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.old_ids import lowest_new_id
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import schema_name
from shardids.mover.sides import SESSION, Side, move_nodes

_CONNECTIONS: Final = 6
_SPLIT: Final = (Kind.ROOT, Kind.DIRECT)
"""How rows of tables are split that an adoption can take in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """A node that takes rows in, those of its shards.

    ``name`` is that of its subscription, and of the publication and the slot on the source.
    """

    side: Side
    shards: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The source and the nodes of an adoption.

    Attributes:
        source: the database that is adopted.
        takers: the nodes with shards, by name.
        cluster: the cluster's fixed properties.
        lowest_new_id: IDs below it are old: the cluster has not issued them.
        plan: what becomes of each table.
        name: of the sessions, with which other names begin.
    """

    source: Side
    takers: tuple[Taker, ...]
    cluster: Description
    lowest_new_id: int
    plan: Plan
    name: str

    @property
    def split(self) -> tuple[TablePlan, ...]:
        """Returns the tables whose rows are split by a key of their own."""
        return tuple(table for table in self.plan.tables if table.kind in _SPLIT)

    @property
    def reference(self) -> tuple[TablePlan, ...]:
        """Returns the tables of which every node gets all rows."""
        return tuple(table for table in self.plan.tables if table.kind is Kind.REFERENCE)

    @property
    def names(self) -> list[str]:
        """Returns the names of all tables that are taken in."""
        return [table.name for table in (*self.split, *self.reference)]

    def definitions(self) -> dict[str, Definition]:
        """Reads what the tables are at the source now, by name."""
        with self.source.engine.connect() as connection:
            return read_definitions(connection, self.names)

    def in_shard(self, table: Definition, shard: int) -> str:
        """Returns the name, in SQL, of a table in a shard."""
        return qualified(schema_name(self.cluster.schema_prefix, shard), table.table)

    def hashed_shard(self, table: TablePlan, definition: Definition) -> str:
        """Returns an expression for the shard of a row at the source."""
        key = table.key or ""
        return hashed_shard(key, family_of(definition.columns[key].type), self.cluster.shard_count)

    def staged_shard(self, table: TablePlan, definition: Definition) -> str:
        """Returns an expression for the shard of a row on a node, which may have come after the switch."""
        key = table.key or ""
        family = family_of(definition.columns[key].type)
        return staged_shard(key, family, self.cluster.shard_count, self.cluster.layout, self.lowest_new_id)

    def row_filter(self, table: TablePlan, definition: Definition, taker: Taker) -> str:
        """Returns the condition that the rows of a node meet at the source."""
        return row_filter(self.hashed_shard(table, definition), taker.shards)

    def end_sessions(self) -> None:
        """Ends the sessions that a process which worked at the adoption before may have left running."""
        for side in (self.source, *(taker.side for taker in self.takers)):
            side.end_sessions(self.name)


@contextmanager
def opened_sides(catalog: Catalog, plan: Plan, source: URL, *, name: str) -> Iterator[Sides]:
    """Yields the source and the nodes, not connected yet. Sessions are called ``name``."""
    description, placement = catalog.describe(), catalog.placement()
    with catalog.engine.connect() as connection:
        made_at = connection.scalar(text("select created_at from shardids_catalog.cluster"))
    engine = administrative_engine(source, what="the source", application_name=name, connections=_CONNECTIONS)
    keep_commits(engine)
    keep_settings(engine, SESSION)
    try:
        with move_nodes(placement, catalog.url, name=name) as nodes:
            yield Sides(
                source=Side(name="source", engine=engine),
                takers=tuple(
                    Taker(
                        side=Side(name=node, engine=nodes[node]),
                        shards=tuple(shards),
                        # A node's name may be too long for a slot, or have letters that a slot can't.
                        name=f"{name}_{number}",
                    )
                    for number, (node, shards) in enumerate(placement.by_node().items())
                ),
                cluster=description,
                lowest_new_id=lowest_new_id(description.layout, made_at),
                plan=plan,
                name=name,
            )
    finally:
        engine.dispose()


def source_url(catalog: Catalog, stored: str, given: str | None) -> URL:
    """Returns the URL to reach the source by: the given one, or the plan's with the catalog's password."""
    return parse_url(given) if given else with_password_of(parse_url(stored), catalog.url)
