"""Changes of the cluster: moves of shards, and runs of migrations."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.moves import Move, recent_moves
from shardids.catalog.pins import Pin, read_pins
from shardids.errors import ConnectionFailed, ShardidsError
from shardids.mover.steps import LIVE, OFFLINE
from shardids.pg.locks import AdvisoryLock, holders_of_key
from shardids.watch.console.databases import Databases, SlowFacts
from shardids.watch.console.figures import told
from shardids.watch.console.watching import Seen

MOST_MOVES: Final = 50
_LAGS: Final = text("""
    select slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint as lag_bytes
    from pg_replication_slots
    where database = current_database() and starts_with(slot_name, :prefix)
      and confirmed_flush_lsn is not null and not pg_is_in_recovery()""")

Values = dict[str, Any]


class Journal:
    """Open moves, the last ended ones, and runs of migrations, from the catalog's last answer."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._known: list[Move] | None = None
        self._runs: list[str] | None = None
        self._runs_at: float | None = None

    def moves(self, seen: Seen) -> list[Values]:
        """Return the moves, newest first; while the catalog does not answer, those of its last answer.

        Raises:
            ConnectionFailed: the catalog does not answer, and never did.
        """
        if self._known is None or seen.catalog_error is None:
            try:
                self._known = self._databases.of_catalog(lambda there: recent_moves(there, MOST_MOVES))
            except ConnectionFailed:
                if self._known is None:
                    raise
        return [move_values(move, seen) for move in self._known]

    def open_now(self, seen: Seen) -> list[Values] | None:
        """Return those that are not over; ``None`` if the catalog does not tell them now."""
        if seen.catalog_error is not None:
            return None
        try:
            return [move for move in self.moves(seen) if move["done"] is None]
        except ShardidsError:
            return None

    def rebalance(self, seen: Seen) -> Values:
        """Return the session of the rebalance that is under way, and the pins, ``None`` if unreadable.

        While the catalog does not answer, ``running`` is its last answer.
        """
        error: ShardidsError | None = None
        found: list[Pin] | None = None
        try:
            found = self._databases.of_catalog(read_pins)
        except ShardidsError as failure:
            error = failure
        return {
            "running": seen.known and seen.known.rebalance,
            "moves": seen.known and dict(seen.known.automatic_moves),
            "pins": None if found is None else [pin_values(one) for one in found],
            "error": told(error),
        }

    def migrations(self, seen: Seen, facts: SlowFacts) -> Values:
        """Return the number of shards per revision, and the runs that are under way.

        While the catalog does not answer, ``running`` is its answer at ``running_at``; ``None`` if it was
        never asked.

        Raises:
            ConnectionFailed: the catalog has never answered.
        """
        error = seen.catalog_error
        if seen.known is None or error is None:
            try:
                self._runs = self._databases.of_catalog(_running)
                self._runs_at = time.time()
            except ConnectionFailed as failure:
                if seen.known is None:
                    raise
                error = failure
        counts = Counter(facts.revisions.values())
        return {
            "read_at": facts.at,
            "revisions": [
                {"revision": revision, "shards": count}
                for revision, count in sorted(counts.items(), key=lambda pair: -pair[1])
            ],
            "errors": facts.sentences,
            "running": self._runs,
            "running_at": self._runs_at,
            "running_error": told(error),
        }


def pin_values(pin: Pin) -> Values:
    """Return a pin for the page."""
    return {
        "shard": pin.shard,
        "node": pin.node,
        "key": pin.key,
        "kind": pin.kind,
        "since": pin.since.timestamp(),
        "do": pin.remedy,
    }


def move_values(move: Move, seen: Seen) -> Values:
    """Return a move as the journal records it, with whether a process works on it."""
    # One that the last reading does not have was begun since.
    running = {one.shard: one.is_running for one in seen.known.moves} if seen.known else {}
    state = move.outcome or ("running" if running.get(move.shard, True) else "interrupted")
    steps = [step.name for step in (OFFLINE if move.offline else LIVE)]
    return {
        "id": move.id,
        "shard": move.shard,
        "from": move.source,
        "to": move.target,
        "how": "offline" if move.offline else "live",
        "step": move.step,
        "at": steps.index(move.step) + 1 if move.step in steps else None,
        "steps": len(steps),
        "state": state,
        "started": move.started_at.timestamp(),
        "done": move.ended_at and move.ended_at.timestamp(),
        "do": f"shardids shard move {move.shard} --resume" if state == "interrupted" else None,
    }


def lags(seen: Seen, databases: Databases) -> dict[int, int]:
    """Return the bytes of its source's log that each moving shard has not confirmed yet."""
    if seen.known is None or not seen.known.moves:
        return {}
    prefix = f"shardids_move_{seen.known.cluster.hex[:8]}_"

    def ask(connection: Connection) -> dict[int, int]:
        found = connection.execute(_LAGS, {"prefix": prefix})
        return {int(row.slot_name.rpartition("_")[2]): row.lag_bytes for row in found}

    answers = databases.of_nodes(dict.fromkeys(seen.nodes, ask))
    return {
        shard: lag
        for answer in answers.values()
        if not isinstance(answer, ShardidsError)
        for shard, lag in answer.items()
    }


def _running(connection: Connection) -> list[str]:
    # The name of a run's session says who does what, since when.
    runs = holders_of_key(connection, AdvisoryLock.MIGRATE_RUN)
    return [run.application or "a run of migrations" for run in runs]
