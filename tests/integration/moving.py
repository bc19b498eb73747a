"""Moves a shard by hand, step by step, as somebody with psql would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, MetaData, insert, select, text
from sqlalchemy.engine import URL

from shardids import provision
from tests.integration.cluster_support import catalog_at


def move_shard(catalog_url: URL, shard: int, to: str, tables: MetaData) -> None:
    """Fences, copies, activates and places: all of it."""
    high_water_tick = fence(catalog_url, shard, to)
    copy(catalog_url, shard, to, tables, high_water_tick)
    place(catalog_url, shard, to)


def fence(catalog_url: URL, shard: int, to: str | None) -> int:
    """Stops the shard where it is; its high-water tick."""
    with _on(catalog_url, shard) as source:
        fencing = text("select high_water_tick from shardids.fence(:shard, :to)")
        return int(source.execute(fencing, {"shard": shard, "to": to}).scalar_one())


def copy(catalog_url: URL, shard: int, to: str, tables: MetaData, high_water_tick: int) -> None:
    """Makes the shard, its tables and their rows on another node, where it issues IDs above a tick."""
    with _on(catalog_url, shard, to) as target:
        provision.create_shard(target, shard)
    with _on(catalog_url, shard) as source, _on(catalog_url, shard, to) as target:
        tables.create_all(target)
        for table in tables.sorted_tables:
            rows = source.execute(select(table)).mappings().all()
            if rows:
                target.execute(insert(table), [dict(row) for row in rows])
        activating = text("select shardids.activate(:shard, :tick)")
        target.execute(activating, {"shard": shard, "tick": high_water_tick})


def place(catalog_url: URL, shard: int, to: str) -> None:
    """Enters the shard's new node in the catalog."""
    with catalog_at(catalog_url) as catalog, catalog.engine.begin() as connection:
        moving = text("update shardids_catalog.placement set node = :to where shard = :shard")
        connection.execute(moving, {"to": to, "shard": shard})


def drop(catalog_url: URL, shard: int, node: str) -> None:
    """Takes a shard's schema away from a node."""
    with _on(catalog_url, shard, node) as connection:
        connection.execute(text(f"drop schema shard_{shard:04} cascade"))
        connection.execute(text("delete from shardids.shard where id = :shard"), {"shard": shard})


@contextmanager
def _on(catalog_url: URL, shard: int, node: str | None = None) -> Iterator[Connection]:
    """A connection to a node, by default the shard's own, in a transaction on the shard's schema."""
    with catalog_at(catalog_url) as catalog:
        there = catalog.nodes()[node] if node else catalog.node_of(shard)
        engine = provision.node_engine(there, catalog.url)
        try:
            with engine.connect() as connection:
                yield connection.execution_options(schema_translate_map={None: f"shard_{shard:04}"})
                connection.commit()
        finally:
            engine.dispose()
