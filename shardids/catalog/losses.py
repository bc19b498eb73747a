"""Losses that were accepted: shards that were lost with a node, and the homes that they were given."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.moves import LAST_STEP
from shardids.catalog.rows import place_lost_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss whose acceptance is not completed: see the comments of ``shardids_catalog.loss``."""

    shard: int
    node: str
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The coming of a shard to a node, by a move or as to the home of a lost shard.

    It issues IDs above ``high_water_tick`` there.
    """

    id: int
    shard: int
    source: str
    node: str
    high_water_tick: int
    at: datetime
    is_moved: bool


def open_losses(connection: Connection) -> list[Loss]:
    """Return the losses that were accepted, and whose home is not activated yet, or was not cleaned."""
    rows = connection.execute(
        text("select shard, node, home from shardids_catalog.loss where completed_at is null order by shard")
    )
    return [Loss(**row._asdict()) for row in rows]


def read_arrivals(connection: Connection) -> list[Arrival]:
    """Return all arrivals of shards on nodes, oldest first."""
    rows = connection.execute(
        text("""
            select id, shard, source, target as node, high_water_tick, coalesce(ended_at, started_at) as at,
                   true as is_moved
            from shardids_catalog.move where high_water_tick is not null
            union all
            select id, shard, node, home, high_water_tick, accepted_at, false from shardids_catalog.loss
            order by id""")
    )
    return [Arrival(**row._asdict()) for row in rows]


def unsettled(connection: Connection) -> list[int]:
    """Return the shards with an open move, or with a home that is not activated yet."""
    rows = connection.scalars(
        text("""
            select shard from shardids_catalog.move where ended_at is null
            union select shard from shardids_catalog.loss where completed_at is null
            order by shard""")
    )
    return list(rows)


def accept_loss(
    connection: Connection, shard: int, *, node: str, home: str, high_water_tick: int, epoch: UUID
) -> None:
    """Place a shard that was lost with a node on its home, and end its open move, which ``epoch`` has.

    Raises:
        ClusterConflict: the shard does not count as lost with that node.
    """
    values = {"shard": shard, "node": node, "home": home, "tick": high_water_tick, "epoch": epoch}
    place_lost_shard(connection, shard, lost_with=node, target=home)
    connection.execute(
        text("""
            update shardids_catalog.move set ended_at = clock_timestamp(), schema = null,
                   outcome = case when step = :last then 'moved' else 'aborted' end
            where shard = :shard and ended_at is null and epoch = :epoch"""),
        values | {"last": LAST_STEP},
    )
    connection.execute(
        text("""
            insert into shardids_catalog.loss (shard, node, home, high_water_tick, epoch)
            values (:shard, :node, :home, :tick, :epoch)"""),
        values,
    )


def complete_loss(connection: Connection, shard: int) -> None:
    """Record that the home of a shard is activated, and that nothing is left to do there."""
    connection.execute(
        text("""
            update shardids_catalog.loss set completed_at = clock_timestamp()
            where shard = :shard and completed_at is null"""),
        {"shard": shard},
    )
