"""Moves, as the catalog's table ``move`` records them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.rows import Catalog

FIRST_STEP: Final = "tables"
PLACE: Final = "place"
LAST_STEP: Final = "clean"
"""The step that is left once the shard is placed on the target."""
ARRIVALS: Final = "shardids_arrival"
"""The catalog's channel for the notice that a shard will soon be on another node."""

Outcome = Literal["moved", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move as the journal records it.

    ``step`` is the last step that was begun; ``outcome`` is ``None`` while the move is not over. The target
    issues IDs above ``high_water_tick``, which is ``None`` as long as it was not made the owner. ``epoch`` is
    that of the leases of the command that works at it, or last did. ``automatic``: ``rebalance --watch``
    began it. ``size_bytes`` is the size of the shard when it began.
    """

    id: int
    shard: int
    source: str
    target: str
    offline: bool
    automatic: bool
    size_bytes: int | None
    step: str
    started_at: datetime
    ended_at: datetime | None
    outcome: Outcome | None
    high_water_tick: int | None
    epoch: UUID

    @property
    def is_on_its_way(self) -> bool:
        """Returns whether the shard is on its way to ``target``: the move is open, and not being undone."""
        # "abort" is shardids.replication.steps.ABORT, of a room above.
        return self.ended_at is None and self.step != "abort"

    def session_name(self, cluster: UUID) -> str:
        """Return the name of the move's sessions, slot, publication and subscription.

        No two moves have the same, not even on servers that several clusters use.
        """
        return f"shardids_move_{cluster.hex[:8]}_{self.id}_{self.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingKey:
    """A key whose move to another shard is not over, as :class:`shardids.tenants.journal.KeyMove` has it."""

    id: int
    key: str
    source: int
    target: int
    step: str
    epoch: UUID


def read_moving_keys(connection: Connection) -> list[MovingKey]:
    """Return the keys whose moves are not over, in the connection's transaction."""
    found = connection.execute(
        text("""select id, key, source, target, step, epoch from shardids_catalog.key_move
                where ended_at is null order by id""")
    )
    return [MovingKey(**row._mapping) for row in found]


COLUMNS: Final = (
    "id, shard, source, target, offline, automatic, size_bytes, step, started_at, ended_at, outcome,"
    " high_water_tick, epoch"
)

_MOVES = text(f"""
    select {COLUMNS} from shardids_catalog.move
    where (:ended or ended_at is null)
      and (cast(:shards as integer[]) is null or shard = any (cast(:shards as integer[])))
    order by id""")  # noqa: S608 -- constant

_RECENT = text(f"""
    (select {COLUMNS} from shardids_catalog.move where ended_at is null)
    union all
    (select {COLUMNS} from shardids_catalog.move where ended_at is not null order by id desc limit :most)
    order by id desc""")  # noqa: S608 -- constant


def read_moves(connection: Connection, shards: list[int] | None = None, *, ended: bool = False) -> list[Move]:
    """Return moves, of these shards or of all, oldest first; with ``ended`` also those that are over."""
    rows = connection.execute(_MOVES, {"shards": shards, "ended": ended})
    return [Move(**row._asdict()) for row in rows]


def recent_moves(connection: Connection, most: int) -> list[Move]:
    """Return the moves that are not over, and of the others the last ``most``, newest first."""
    rows = connection.execute(_RECENT, {"most": most})
    return [Move(**row._asdict()) for row in rows]


def open_moves(catalog: Catalog, shards: Iterable[int] | None = None) -> list[Move]:
    """Return the moves that are not over, of these shards or of all, oldest first."""
    with catalog.engine.connect() as connection:
        return read_moves(connection, None if shards is None else list(shards))


def all_moves(catalog: Catalog) -> list[Move]:
    """Return all moves, oldest first."""
    with catalog.engine.connect() as connection:
        return read_moves(connection, ended=True)


def shards_moved_within(connection: Connection, seconds: float) -> set[int]:
    """Return the shards whose last move is open, or ended so recently, also those whose move was undone."""
    return set(
        connection.scalars(
            text("""
                select distinct shard from shardids_catalog.move
                where ended_at is null or ended_at > clock_timestamp() - make_interval(secs => :seconds)"""),
            {"seconds": seconds},
        )
    )


def bytes_per_second(connection: Connection, default: float) -> float:
    """Return how fast the last moves of shards of 16 MB or more were: the slower half of ten counts."""
    found = connection.scalar(
        text("""
            select percentile_cont(0.25) within group (order by m.size_bytes / m.seconds) from (
              select size_bytes, greatest(extract(epoch from ended_at - started_at), 0.1)::float8 as seconds
              from shardids_catalog.move
              where outcome = 'moved' and not offline and size_bytes >= 16000000
              order by id desc limit 10) m""")
    )
    return float(found or default)


def record_arrival(
    connection: Connection, shard: int, *, source: str, target: str, high_water_tick: int
) -> None:
    """Record that a shard has come to a node by other means than a move of shardids."""
    connection.execute(
        text("""
            insert into shardids_catalog.move
              (shard, source, target, offline, step, high_water_tick, ended_at, outcome)
            values (:shard, :source, :target, true, :step, :tick, clock_timestamp(), 'moved')"""),
        {"shard": shard, "source": source, "target": target, "step": LAST_STEP, "tick": high_water_tick},
    )
