"""Ticks that shards issued by a wrong clock: the catalog names them, every node's engine passes over them.

A range is written to the catalog first. Whatever makes or activates a shard on a node brings it there before,
with :func:`bring`, so that no node issues one of its ticks again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids.catalog.rows import Catalog
from shardids.ids.layout import Layout

IdSpan = tuple[int, int]
"""The first ID and the last."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Skipped:
    """A range of ticks that a shard passes over, both ends included."""

    shard: int
    first_tick: int
    last_tick: int

    def ids(self, layout: Layout) -> IdSpan:
        """Return the first and the last ID of the range."""
        return id_of_tick(layout, self.shard, self.first_tick), id_of_tick(layout, self.shard, self.last_tick)


def id_of_tick(layout: Layout, shard: int, tick: int) -> int:
    """Return the ID of a tick in a shard."""
    sequence = tick & (layout.sequence_limit - 1)
    return layout.encode(ms=tick >> layout.sequence_bits, shard=shard, sequence=sequence)


def skipped_ranges(catalog: Catalog, shards: Collection[int] | None = None) -> list[Skipped]:
    """Return the ranges of some shards, or of all, as the catalog has them."""
    with catalog.engine.connect() as connection:
        return read_skipped(connection, "shardids_catalog", shards)


def read_skipped(
    connection: Connection, schema: str = "shardids", shards: Collection[int] | None = None
) -> list[Skipped]:
    """Return the ranges that the catalog or, with its schema, a node has."""
    found = connection.execute(
        text(f"""
            select shard, first_tick, last_tick from {schema}.skipped
            where cast(:shards as integer[]) is null or shard = any(:shards) order by 1, 2"""),  # noqa: S608 -- one of two constants
        {"shards": None if shards is None else list(shards)},
    )
    return [Skipped(**row._mapping) for row in found]


def record_skipped(catalog: Connection, skipped: Skipped) -> None:
    """Write a range to the catalog, or lengthens the one that begins with the same tick."""
    catalog.execute(_WRITE_CATALOG, _values(skipped))


def bring(node: Connection, ranges: Iterable[Skipped]) -> list[Skipped]:
    """Write ranges to a node in the open transaction; return those that it lacked.

    The function next_id() of a shard that is there gets its bound.
    """
    lacking = []
    for skipped in ranges:
        if node.execute(_WRITE_NODE, _values(skipped)).rowcount:
            lacking.append(skipped)
            node.execute(_BOUND, {"shard": skipped.shard})
    return lacking


def _values(skipped: Skipped) -> dict[str, int]:
    return {
        "shard": skipped.shard,
        "first_tick": skipped.first_tick,
        "last_tick": skipped.last_tick,
    }


_WRITE_CATALOG = text("""
    insert into shardids_catalog.skipped as there (shard, first_tick, last_tick)
    values (:shard, :first_tick, :last_tick)
    on conflict (shard, first_tick) do update set last_tick = excluded.last_tick
    where there.last_tick < excluded.last_tick""")
_WRITE_NODE = text("""
    insert into shardids.skipped as there (shard, first_tick, last_tick)
    values (:shard, :first_tick, :last_tick)
    on conflict (shard, first_tick) do update set last_tick = excluded.last_tick
    where there.last_tick < excluded.last_tick""")
_BOUND = text("""
    select shardids.define_next_id(s.id, s.schema) from shardids.shard s
    where s.id = :shard and shardids.skips_from(s.id) is not null
      and to_regprocedure(format('%I.late_id_%s(regclass)', s.schema, s.id)) is not null""")
