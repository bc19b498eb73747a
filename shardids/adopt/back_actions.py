"""What the steps of the way back do: they make it with the switch, and take it, or give it up, later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardids.adopt import back_numbers, barrier, handing_back, staging, way_back
from shardids.adopt.definitions import Definition
from shardids.adopt.events import Lagging, Noted, OnEvent, Waiting
from shardids.adopt.journal import Journal
from shardids.adopt.sides import Sides, Taker
from shardids.errors import ConnectionFailed
from shardids.mover.barrier import with_locks

_WORTH_TRYING = 0.1
"""The source is close enough if it confirms a position within this part of the longest pause."""
_LEFT_THERE = (
    "the source does not answer ({problem}) and was left as it is. If it comes back, it has subscriptions"
    " {names}; of each: alter subscription … disable; alter subscription … set (slot_name = none);"
    " drop subscription …. Its tables refuse writes unless somebody disabled the trigger shardids_barrier"
)


class BackActions:
    """Takes the steps of the way back. Every method is idempotent.

    Attributes:
        pause_ms: how long no writes were taken, once the source takes them again.
    """

    def __init__(self, *, journal: Journal, sides: Sides, max_pause_s: float, on_event: OnEvent) -> None:
        self.pause_ms: float | None = None
        self._journal = journal
        self._sides = sides
        self._max_pause_s = max_pause_s
        self._on_event = on_event
        self._stopped: float | None = None

    def _there(self) -> dict[str, Definition]:
        return self._sides.definitions()

    def prepare(self) -> None:
        """Lets the nodes keep what the source is to be sent."""
        there = self._there()
        self._each(lambda taker: way_back.prepare(self._sides, taker, there, self._on_event))

    def draw_near(self) -> None:
        """Lets the nodes pass over what came from the source, so that little is left for the pause."""
        self._each(way_back.advance)

    def follow(self) -> None:
        """Lets the source follow the shards."""
        for taker in self._sides.takers:
            way_back.follow_back(self._sides, taker)

    def drop(self) -> None:
        """Drops all that makes the way back; shards, source and barriers stay as they are."""
        # The source may be gone by now.
        self._each(way_back.dismantle)
        for taker in self._sides.takers:
            way_back.unfollow(self._sides, taker)

    def guard(self) -> None:
        """Creates write barriers on the shards' tables, open."""
        self._each(self._guard)

    def _guard(self, taker: Taker) -> None:
        # A process that died may have fenced some.
        staging.open_shards(taker)
        handing_back.make_barriers(taker, self._on_wait)

    def approach(self) -> None:
        """Waits until the source is close enough to the shards for a short pause."""
        within_s = max(self._max_pause_s * _WORTH_TRYING, 0.05)
        handing_back.approach(self._sides, self._on_lag, within_s=within_s)

    def hand_back(self) -> None:
        """Stops writes to the shards, waits until the source has them all, and records that it takes over."""
        back_numbers.try_sequences(self._sides)
        self.guard()
        self._stopped = handing_back.close_shards(
            self._sides,
            self._there(),
            max_pause_s=self._max_pause_s,
            on_wait=self._on_wait,
            on_lag=self._on_lag,
        )
        self._journal.hand_back()

    def stay(self) -> None:
        """Lets the shards take writes again, which were to be handed back."""
        self._each(staging.open_shards)
        handing_back.open_references(self._sides)

    def set_sequences(self) -> None:
        """Lets the source's sequences go on behind its own IDs."""
        back_numbers.set_sequences(self._sides)

    def reopen_source(self) -> None:
        """Lets the source take writes."""
        barrier.reopen(self._sides)
        if self._stopped is not None:
            self.pause_ms = (time.monotonic() - self._stopped) * 1000

    def leave_shards(self) -> None:
        """Leaves the shards fenced, with their rows, and nothing of the adoption at the source.

        Their barriers stay: the fence alone stops IDs, and not writes.
        """
        barrier.drop_barrier(self._sides)
        self.drop()
        self._each(lambda taker: staging.unstage(taker, self._sides))

    def _drop_barriers(self, taker: Taker) -> None:
        for shard in taker.shards:
            with_locks(taker.side, "select shardids.drop_barriers(:shard)", {"shard": shard})

    def finish(self) -> None:
        """Ends the way back: the shards are on their own, and the source, if still there, stays closed."""
        self._each(way_back.dismantle)
        self._each(self._drop_barriers)
        self._each(lambda taker: staging.unstage(taker, self._sides))
        try:
            self._finish_source()
        except ConnectionFailed as error:
            # No connection is opened either once another process has the lock.
            self._journal.require_lock()
            names = ", ".join(way_back.back_name(taker) for taker in self._sides.takers)
            self._on_event(Noted(note=_LEFT_THERE.format(names=names, problem=error.message)))

    def _finish_source(self) -> None:
        self._sides.source.end_sessions(self._sides.name)
        # Whoever repaired a row there may have disabled a trigger.
        barrier.make_barrier(self._sides, barrier.parts_of(self._there()), self._on_wait)
        for taker in self._sides.takers:
            way_back.unfollow(self._sides, taker)

    def _each(self, act: Callable[[Taker], None]) -> None:
        """Does something on all nodes at once; raises the first failure when all have ended."""
        with ThreadPoolExecutor(len(self._sides.takers)) as pool:
            for done in [pool.submit(act, taker) for taker in self._sides.takers]:
                done.result()

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(attempt=attempt, reason=reason))
