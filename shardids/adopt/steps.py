"""The steps of an adoption: what each does, what undoes it, and whether it stops writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text

from shardids.adopt import barrier, comparing, relay, replication, staging
from shardids.adopt.back_actions import BackActions
from shardids.adopt.definitions import Definition
from shardids.adopt.events import Lagging, OnEvent, Waiting
from shardids.adopt.filters import family_of
from shardids.adopt.journal import FOLLOW, Journal
from shardids.adopt.numbering import Numbering
from shardids.adopt.plan import OldIds, Plan
from shardids.adopt.sides import Sides, Taker
from shardids.adopt.timelines import note_timelines, require_timelines
from shardids.catalog.old_ids import (
    BY_DIRECTORY,
    BY_FAN_OUT,
    BY_KEY,
    OldIdRule,
    fill_directory,
    write_old_ids,
)
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed
from shardids.mover.replication import unpublish, unsubscribe

MAX_PAUSE_S: Final = 2.0
"""How long writes to the source may be stopped by one attempt, unless the caller says otherwise."""
_WORTH_TRYING: Final = 0.1
"""The nodes are close enough if they confirm a position within this part of the longest pause."""
_OPENING_S: Final = 20.0
"""How long to keep trying to open shards once they have taken over."""
_RULES: Final = {OldIds.KEY: BY_KEY, OldIds.DIRECTORY: BY_DIRECTORY, OldIds.FAN_OUT: BY_FAN_OUT}


class Actions:
    """Takes and undoes the steps of one adoption. Every method in the tables below is idempotent.

    Attributes:
        pause_ms: how long no writes were taken, once the shards take them.
        back: the same for the way back.
    """

    def __init__(
        self, *, catalog: Catalog, journal: Journal, sides: Sides, max_pause_s: float, on_event: OnEvent
    ) -> None:
        self.pause_ms: float | None = None
        self.back = BackActions(journal=journal, sides=sides, max_pause_s=max_pause_s, on_event=on_event)
        self._catalog = catalog
        self._journal = journal
        self._sides = sides
        self._max_pause_s = max_pause_s
        self._on_event = on_event
        self._stopped: float | None = None
        self._there: dict[str, Definition] | None = None

    @property
    def there(self) -> dict[str, Definition]:
        """Returns the tables of the source, which are until the switch as they were at the beginning.

        Raises:
            AdoptionFailed: one was changed.
        """
        if self._there is None:
            found = self._sides.definitions()
            if self._journal.step not in [step.name for step in AFTER]:
                barrier.require_shapes(found, self._journal.adoption.shapes)
            self._there = found
        return self._there

    @property
    def bare_names(self) -> list[str]:
        """Returns the names of the tables that are split, as the shards have them."""
        return staging.bare_names(self._sides)

    def close(self) -> None:
        """Lets no client write to the shards."""
        self._each(lambda taker: staging.close_shards(taker, self._sides, self.there))

    def give_back(self) -> None:
        """Empties the shards and lets clients write to them again."""
        self._each(lambda taker: staging.give_back(taker, self._sides))

    def stage(self) -> None:
        """Makes the tables in which rows arrive."""
        self._each(lambda taker: staging.stage(taker, self._sides, self.there))

    def unstage(self) -> None:
        """Drops the tables in which rows arrive."""
        self._each(lambda taker: staging.unstage(taker, self._sides))

    def make_relay(self) -> None:
        """Lets the relay fetch all rows of the source."""
        if self._sides.relay:
            relay.make(self._sides, self._sides.relay, self.there)

    def unmake_relay(self) -> None:
        """Removes all from the relay, and what it needs from the source."""
        if self._sides.relay:
            relay.unmake(self._sides, self._sides.relay, self._on_event)

    def await_relay(self) -> None:
        """Waits until the relay has all rows."""
        if self._sides.relay:
            replication.await_copy(self._sides, self._sides.source, [self._sides.relay], self._on_event)

    def place_rows(self) -> None:
        """Gives rows without a key of their own their shards on the relay."""
        if self._sides.relay:
            relay.place_rows(self._sides, self._sides.relay, self.there)

    def publish(self) -> None:
        """Publishes rows for the nodes, and keeps the log for them from now on."""
        for taker in self._sides.takers:
            replication.publish(self._sides, taker, self.there)

    def unpublish(self) -> None:
        """Drops the nodes' slots and publications."""
        for taker in self._sides.takers:
            unpublish(self._sides.feed, taker.name)

    def subscribe(self) -> None:
        """Lets the nodes fetch the rows."""
        for taker in self._sides.takers:
            replication.subscribe(self._sides, taker)

    def unsubscribe(self) -> None:
        """Drops the subscriptions of the nodes."""
        self._each(lambda taker: unsubscribe(taker.side, taker.name))

    def await_copy(self) -> None:
        """Waits until the nodes have all rows, as of one moment."""
        replication.await_copy(self._sides, self._sides.feed, self._sides.takers, self._on_event)
        replication.await_confirmed(self._sides, self._on_lag)
        for taker in self._sides.takers:
            self._analyze(taker)

    def _analyze(self, taker: Taker) -> None:
        """Gathers statistics, which are not replicated."""
        with taker.side.autocommit() as connection:
            for shard in taker.shards:
                connection.execute(text("select shardids.analyze(:shard)"), {"shard": shard})

    def compare(self) -> None:
        """Compares all rows."""
        comparing.compare(self._sides, self.there, self._on_event)
        note_timelines(self._sides.followers)
        self._journal.note_comparison()

    def make_barrier(self) -> None:
        """Creates the write barrier on the source, open."""
        barrier.make_barrier(self._sides, barrier.parts_of(self.there), self._on_wait)

    def drop_barrier(self) -> None:
        """Drops the write barrier from the source."""
        barrier.drop_barrier(self._sides)

    def catch_up(self) -> None:
        """Waits until the nodes are close enough to the source for a short pause."""
        if self._journal.adoption.keeps_back:
            self.back.draw_near()
        within_s = max(self._max_pause_s * _WORTH_TRYING, 0.05)
        replication.await_confirmed(self._sides, self._on_lag, within_s=within_s)
        relay.require_placed(self._sides, self.there)

    def switch(self) -> None:
        """Stops writes at the source, waits until the nodes have them all, and lets the shards take over."""
        require_timelines(self._sides.followers)
        numbering = Numbering(self._sides, self.there)
        self._stopped = barrier.close(
            self._sides,
            self._journal.adoption.shapes,
            barrier.parts_of(self.there),
            max_pause_s=self._max_pause_s,
            on_wait=self._on_wait,
            catch_up=self.catch_up,
            require=lambda: relay.require_placed(self._sides, self.there),
        )
        numbering.pass_on()
        # A list of IDs takes longer to write than writes may be stopped; until then every shard is asked.
        keeps_back = self._journal.adoption.keeps_back
        first = next(step.name for step in AFTER if keeps_back or not step.only_back)
        self._journal.switch(self._rules(directory=BY_FAN_OUT), first)

    def reopen(self) -> None:
        """Lets the source take writes again."""
        barrier.reopen(self._sides)

    def open_shards(self) -> None:
        """Lets the shards take writes; keeps trying for a while, since they have taken over."""
        deadline = time.monotonic() + _OPENING_S
        while True:
            try:
                self._each(staging.open_shards)
                break
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)
        if self._stopped is not None:
            self.pause_ms = (time.monotonic() - self._stopped) * 1000

    def list_old_ids(self) -> None:
        """Fills the directories of old IDs, each in one transaction with its rule."""
        for rule in self._rules(directory=BY_DIRECTORY):
            if rule.rule == BY_DIRECTORY:
                with self._catalog.engine.begin() as connection:
                    write_old_ids(connection, rules=[rule])
                    for taker in self._sides.takers:
                        fill_directory(connection, rule.table, staging.old_ids(taker, self._sides, rule))

    def clean(self) -> None:
        """Drops what brought the rows; the barrier stays, so that nobody writes where nobody reads."""
        self.unsubscribe()
        if not self._journal.adoption.keeps_back:
            self.unstage()
        self._each(lambda taker: staging.drop_barriers(taker, self._sides))
        # Last: the source may be gone by now.
        self.unpublish()
        self.unmake_relay()

    def _rules(self, *, directory: str) -> list[OldIdRule]:
        rules = {**_RULES, OldIds.DIRECTORY: directory}
        return [
            OldIdRule(table=self.there[table.name].table, column=table.id, rule=rules[table.old_ids])
            for table in self._sides.split
            if table.id is not None
            and table.old_ids is not None
            and family_of(self.there[table.name].columns[table.id].type) == "integer"
        ]

    def _each(self, act: Callable[[Taker], None]) -> None:
        """Does something on all nodes at once; raises the first failure when all have ended."""
        with ThreadPoolExecutor(len(self._sides.takers)) as pool:
            for done in [pool.submit(act, taker) for taker in self._sides.takers]:
                done.result()

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(attempt=attempt, reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of an adoption. ``act`` and ``undo`` are idempotent.

    Attributes:
        name: the step's name in the journal.
        act: takes the step.
        undo: removes whatever the step has done; ``None`` if undoing the other steps leaves nothing of it.
        stops_writes: neither side may take writes during this step, which ends with the journal's entry that
            the other side takes over.
        only_back: it is for adoptions that keep a way back.
    """

    name: str
    act: Callable[[Actions], None]
    undo: Callable[[Actions], None] | None = None
    stops_writes: bool = False
    only_back: bool = False


RUN: Final = (
    Step(name="close", act=Actions.close, undo=Actions.give_back),
    Step(name="stage", act=Actions.stage, undo=Actions.unstage),
    Step(name="publish", act=Actions.publish, undo=Actions.unpublish),
    Step(name="subscribe", act=Actions.subscribe, undo=Actions.unsubscribe),
    Step(name="copy", act=Actions.await_copy),
    Step(name="compare", act=Actions.compare),
)
"""What brings the rows. Afterwards the nodes follow the source: step ``follow``."""

SWITCH: Final = (
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(
        name="way back",
        act=lambda actions: actions.back.prepare(),
        undo=lambda actions: actions.back.drop(),
        only_back=True,
    ),
    Step(name="catch up", act=Actions.catch_up),
    # By the journal's entry the shards take over: the source takes writes before it, they do after it.
    Step(name="switch", act=Actions.switch, undo=Actions.reopen, stops_writes=True),
)
"""What makes the shards take over."""

AFTER: Final = (
    # Repeated once a client has written to the shards, this would lose the write: it ends before they open.
    Step(name="begin", act=lambda actions: actions.back.draw_near(), only_back=True),
    Step(name="open", act=Actions.open_shards),
    Step(name="old ids", act=Actions.list_old_ids),
    Step(name="clean", act=Actions.clean),
    Step(name="follow back", act=lambda actions: actions.back.follow(), only_back=True),
)
"""What is left once they have. With a way back the source then follows the shards: step ``kept``."""

RUN_VIA: Final = (
    *RUN[:2],
    Step(name="relay", act=Actions.make_relay, undo=Actions.unmake_relay),
    Step(name="copy to relay", act=Actions.await_relay),
    Step(name="place", act=Actions.place_rows),
    *RUN[2:],
)
"""What brings the rows through a relay."""


def run_steps(plan: Plan) -> tuple[Step, ...]:
    """Returns the steps that bring the rows."""
    return RUN if plan.via is None else RUN_VIA


STEPS: Final = (*RUN, *SWITCH, *AFTER)
__all__ = [
    "AFTER",
    "FOLLOW",
    "MAX_PAUSE_S",
    "RUN",
    "RUN_VIA",
    "STEPS",
    "SWITCH",
    "Actions",
    "Step",
    "run_steps",
]
