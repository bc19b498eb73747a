"""What the catalog's table ``move`` records of moves, and of shards that were lost with their node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.rows import Catalog

FIRST_STEP: Final = "tables"
LAST_STEP: Final = "clean"
"""The step that is left once the shard is placed on the target."""
ABORT: Final = "abort"
"""What the journal records in place of a step while a move is being undone."""
LOSS: Final = "accept loss"
"""What the journal records in place of a step while a shard that was lost with its node gets a home."""

Outcome = Literal["moved", "aborted", "accepted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move as the journal records it.

    ``step`` is the last step that was begun; ``outcome`` is ``None`` while the move is not over. If the step
    is :data:`LOSS`, the shard was lost with ``source``, and ``target`` is its new home. The target issues IDs
    above ``high_water_tick``, which is ``None`` as long as it was not made the owner.
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

    def session_name(self, cluster: UUID) -> str:
        """Returns the name of the move's sessions, slot, publication and subscription.

        No two moves have the same, not even on servers that several clusters use.
        """
        return f"shardids_move_{cluster.hex[:8]}_{self.id}_{self.shard}"


COLUMNS: Final = "id, shard, source, target, offline, step, started_at, ended_at, outcome, high_water_tick"

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


def read_moves(connection: Connection, shards: list[int] | None, *, ended: bool = False) -> list[Move]:
    """Returns moves, of these shards or of all, oldest first; with ``ended`` also those that are over."""
    rows = connection.execute(_MOVES, {"shards": shards, "ended": ended})
    return [Move(**row._asdict()) for row in rows]


def recent_moves(connection: Connection, most: int) -> list[Move]:
    """Returns the moves that are not over, and of the others the last ``most``, newest first."""
    rows = connection.execute(_RECENT, {"most": most})
    return [Move(**row._asdict()) for row in rows]


def open_moves(catalog: Catalog, shards: Iterable[int] | None = None) -> list[Move]:
    """Returns the moves that are not over, of these shards or of all, oldest first."""
    with catalog.engine.connect() as connection:
        return read_moves(connection, None if shards is None else list(shards))


def all_moves(catalog: Catalog) -> list[Move]:
    """Returns all moves, oldest first."""
    with catalog.engine.connect() as connection:
        return read_moves(connection, None, ended=True)
