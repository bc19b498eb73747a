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
    that of the leases of the command that works at it, or last did.
    """

    id: int
    shard: int
    source: str
    target: str
    offline: bool
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


COLUMNS: Final = (
    "id, shard, source, target, offline, step, started_at, ended_at, outcome, high_water_tick, epoch"
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
