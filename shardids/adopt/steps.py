"""The steps of an adoption, and of its way back: what each does, and what undoes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from shardids.adopt.back import handing_back, way_back
from shardids.adopt.plan.document import OldIds
from shardids.adopt.run import barrier, comparing, following, numbers, relay, slots, staging
from shardids.adopt.run.journal import FINISH, HANDED_BACK, KEPT, Adoption, Journal
from shardids.adopt.run.sides import Sides, Taker
from shardids.adopt.run.sparing import Sparing
from shardids.catalog.old_ids import (
    BY_DIRECTORY,
    BY_FAN_OUT,
    BY_KEY,
    OldIdRule,
    fill_from,
    write_old_ids,
)
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import ConnectionFailed
from shardids.pg.definitions import Definition, read_definitions
from shardids.pg.queries import quoted
from shardids.replication.steps import Lagging, Noted, Step, Waiting
from shardids.replication.subscriptions import unpublish, unsubscribe

_WORTH_TRYING: Final = 0.1
"""A follower is close enough if it confirms a position within this part of the longest pause."""
_OPENING_S: Final = 20.0
"""How long to keep trying to open shards once they have taken over."""
_RULES: Final = {OldIds.KEY: BY_KEY, OldIds.DIRECTORY: BY_DIRECTORY, OldIds.FAN_OUT: BY_FAN_OUT}
_LEFT_THERE: Final = "the source does not answer ({problem}) and was left as it is. If it comes back, it has "
_RELAY_LEFT: Final = (
    "{relay}, a publication and a replication slot, for which it keeps its log:"
    " select pg_drop_replication_slot('{relay}'); drop publication {relay}"
)
_BACK_LEFT: Final = (
    "subscriptions {names}; of each: alter subscription … disable; alter subscription … set"
    " (slot_name = none); drop subscription …. Its tables refuse writes unless somebody disabled the trigger"
    " shardids_barrier"
)


class Actions:
    """Takes and undoes the steps of one adoption. Every method in the tables below is idempotent.

    Attributes:
        pause_ms: how long no writes were taken, once the shards take them, or the source does again.
    """

    def __init__(
        self, *, catalog: Catalog, journal: Journal, sides: Sides, max_pause_s: float, sparing: Sparing
    ) -> None:
        self.pause_ms: float | None = None
        self._catalog = catalog
        self._journal = journal
        self._sides = sides
        self._max_pause_s = max_pause_s
        self._near_s = max(max_pause_s * _WORTH_TRYING, 0.05)
        self._on_event = self._sparing = sparing
        self._stopped: float | None = None
        self._there: dict[str, Definition] | None = None

    @property
    def keeps_back(self) -> bool:
        """Returns whether the switch keeps a way back."""
        return self._journal.adoption.keeps_back

    @property
    def there(self) -> dict[str, Definition]:
        """Returns the tables of the source, which are until the switch as they were at the beginning.

        Raises:
            AdoptionFailed: one was changed.
        """
        if self._there is None:
            found = self._sides.definitions()
            if self._journal.adoption.switched_at is None:
                barrier.require_shapes(found, self._journal.adoption.shapes)
            self._there = found
        return self._there

    @property
    def bare_names(self) -> list[str]:
        """Returns the names of the tables that are split, as the shards have them."""
        return staging.bare_names(self._sides)

    def close(self) -> None:
        """Let no client write to the shards."""
        self._each(lambda taker: staging.close_shards(taker, self._sides, self.there))

    def give_back(self) -> None:
        """Empty the shards and let clients write to them again."""
        self._each(lambda taker: staging.give_back(taker, self._sides))

    def stage(self) -> None:
        """Make the arrival tables."""
        self._each(lambda taker: staging.stage(taker, self._sides, self.there))

    def unstage(self) -> None:
        """Drop the arrival tables."""
        self._each(lambda taker: staging.unstage(taker, self._sides))

    def make_relay(self) -> None:
        """Make the relay, without rows."""
        relay.make(self._sides, self.there, self._sparing)

    def unmake_relay(self) -> None:
        """Remove all from the relay, and its objects from the source."""
        if self._sides.via is not None:
            relay.unmake(self._sides)
            relay.leave_source(self._sides, self._on_event)

    def copy_to_relay(self) -> None:
        """Let the relay fetch all rows."""
        relay.copy(self._sides, self.there, self._sparing)

    def place_rows(self) -> None:
        """Give rows without a key their shards on the relay."""
        with self._sparing.beside([self._sides.relay.side]):
            relay.place_rows(self._sides, self.there)

    def publish(self) -> None:
        """Publish rows for the nodes, and keep the log for them from now on."""
        for taker in self._sides.takers:
            following.publish(self._sides, taker, self.there, self._sparing)

    def unpublish(self) -> None:
        """Drop the nodes' slots and publications."""
        for taker in self._sides.takers if self._sides.via is not None else ():
            unpublish(self._sides.relay.side, taker.name)

    def subscribe(self) -> None:
        """Let the nodes fetch the rows."""
        for taker in self._sides.takers:
            following.subscribe(self._sides, taker)
            slots.note_copy_slots(self._sides.relay.side, taker)

    def unsubscribe(self) -> None:
        """Drop the subscriptions of the nodes."""
        self._each(lambda taker: unsubscribe(taker.side, taker.name))

    def await_copy(self) -> None:
        """Wait until the nodes have all rows, as of one moment."""
        following.await_copy(self._sides, self._sides.relay.side, self._sides.takers, self._on_event)
        following.await_confirmed(self._sides, self._on_lag)

    def make_indexes(self) -> None:
        """Make the indexes that wait for the rows, and gather statistics on these."""
        with self._sparing.beside([taker.side for taker in self._sides.takers]):
            self._each(staging.make_indexes)
            self._each(staging.analyze)

    def compare(self, *, is_anew: bool = False) -> None:
        """Compare all rows; unless anew, go on where it was interrupted.

        Tables whose rows may have changed past the log are compared again, and all if a server was replaced.
        Once rows differ, no switch goes by what earlier comparisons have found.
        """
        # As they are before rows are read: a change past the log that comes later is seen by the switch, and
        # so is a server that is replaced.
        found = following.timelines(self._sides.followers)
        timelines = ", ".join(f"{name} {timeline}" for name, timeline in found.items())
        now = {name: (table.storage_version, timelines) for name, table in self._sides.definitions().items()}
        was = {} if is_anew else self._journal.adoption.compared
        try:
            comparing.compare(
                self._sides,
                self.there,
                self._sparing,
                compared=[name for name, one in was.items() if one == now.get(name)],
                on_table=lambda name: self._journal.note_compared(name, now[name]),
            )
        except comparing.RowsDiffer:
            if is_anew:
                self._journal.forget_compared()
            raise
        following.note_timelines(self._sides.followers, found)
        self._journal.note_comparison()

    def make_barrier(self) -> None:
        """Create the write barrier on the source, open."""
        barrier.make_barrier(self._sides, barrier.parts_of(self.there), self._on_wait)

    def drop_barrier(self) -> None:
        """Drop the write barrier from the source."""
        barrier.drop_barrier(self._sides)

    def prepare_back(self) -> None:
        """Let the nodes keep the changes for the source."""
        self._each(lambda taker: way_back.prepare(self._sides, taker, self.there, self._on_event))

    def drop_back(self) -> None:
        """Drop all that makes the way back; shards, source and barriers stay as they are."""
        # The source may be gone by now.
        self._each(way_back.dismantle)
        for taker in self._sides.takers:
            way_back.unfollow(self._sides, taker)

    def draw_near(self) -> None:
        """Let the way back pass over what came from the source, so that little is left for the pause."""
        self._each(lambda taker: way_back.advance(taker, self._on_event))

    def begin_back(self) -> None:
        """Let the way back begin behind all that came from the source."""
        self._each(lambda taker: way_back.begin(taker, self._on_event))

    def catch_up(self) -> None:
        """Wait until the nodes are close enough to the source for a short pause."""
        if self.keeps_back:
            self.draw_near()
        following.await_confirmed(self._sides, self._on_lag, within_s=self._near_s)
        relay.require_placed(self._sides, self.there)

    def switch(self) -> None:
        """Stop writes at the source, wait until the nodes have them all, and let the shards take over."""
        following.require_timelines(self._sides.followers)
        with self._sides.source.begin() as source:
            barrier.require_brought(source, self._sides, self._journal.adoption)
        numbering = numbers.Numbering(self._sides, self.there)
        # A list of IDs takes longer to write than writes may be stopped; until then every shard is asked.
        rules = self._rules(directory=BY_FAN_OUT)
        self._stopped = barrier.close(
            self._sides,
            self._journal.adoption,
            barrier.parts_of(self.there),
            max_pause_s=self._max_pause_s,
            on_wait=self._on_wait,
            catch_up=self.catch_up,
            require=lambda: relay.require_placed(self._sides, self.there),
        )
        numbering.pass_on()
        first = next(step.name for step in AFTER if step.is_needed(self))
        self._journal.switch(rules, first)

    def reopen(self) -> None:
        """Let the source take writes again."""
        barrier.reopen(self._sides)

    def open_shards(self) -> None:
        """Let the shards, then reference tables take writes; keep trying, since they have taken over."""
        deadline = time.monotonic() + _OPENING_S
        while True:
            try:
                self._each(staging.open_shards)
                break
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)
        self._note_pause()
        self.open_references()

    def open_references(self) -> None:
        """Let reference tables take writes."""
        self._each(lambda taker: staging.open_references(taker, self._sides, self._on_wait))

    def list_old_ids(self) -> None:
        """Fill the directories of old IDs; a table has its rule once its directory is whole."""
        for rule in self._rules(directory=BY_DIRECTORY):
            if rule.rule == BY_DIRECTORY:
                for taker in self._sides.takers:
                    ids = partial(staging.old_ids, taker, self._sides, rule)
                    fill_from(self._catalog.engine, rule.table, taker.side.name, ids)
                with self._catalog.engine.begin() as connection:
                    write_old_ids(connection, rules=[rule])

    def clean(self) -> None:
        """Drop what brought the rows; the barrier stays, so that nobody writes where nobody reads."""
        self.unsubscribe()
        if not self.keeps_back:
            self.unstage()
        self._each(staging.drop_barriers)
        self.unpublish()
        relay.unmake(self._sides)
        self._at_source_if_there(
            lambda: relay.leave_source(self._sides, self._on_event),
            left=_RELAY_LEFT.format(relay=self._sides.relay_name),
        )

    def follow_back(self) -> None:
        """Let the source follow the shards."""
        try:
            self._sides.await_source()
            self._sides.source.end_sessions(self._sides.name)
            # It may have been out of reach before.
            relay.leave_source(self._sides, self._on_event)
            for taker in self._sides.takers:
                way_back.follow_back(self._sides, taker)
        except ConnectionFailed as error:
            raise ConnectionFailed(
                error.message,
                hint="When all servers answer: shardids adopt run --resume. If the source is lost:"
                " shardids adopt finish",
            ) from error

    def _at_source_if_there(self, act: Callable[[], None], *, left: str) -> None:
        """Do work at the source that the shards don't need; report ``left`` if it does not answer."""
        try:
            self._sides.await_source()
            self._sides.source.end_sessions(self._sides.name)
            act()
        except ConnectionFailed as error:
            # No connection is opened either once another process has the lock.
            self._journal.require_lock()
            self._on_event(Noted(note=_LEFT_THERE.format(problem=error.message) + left))

    def guard(self) -> None:
        """Create write barriers on the shards' tables, open."""
        self._each(self._guard)

    def _guard(self, taker: Taker) -> None:
        # A process that died may have fenced some.
        staging.open_shards(taker)
        handing_back.make_barriers(taker, self._on_wait)

    def approach(self) -> None:
        """Wait until the source is close enough to the shards for a short pause."""
        handing_back.approach(self._sides, self._on_lag, within_s=self._near_s)

    def hand_back(self) -> None:
        """Stop writes to the shards, wait until the source has them all, and record that it takes over."""
        numbers.try_sequences(self._sides)
        self.guard()
        self._stopped = handing_back.close_shards(
            self._sides,
            self.there,
            max_pause_s=self._max_pause_s,
            on_wait=self._on_wait,
            approach=self.approach,
        )
        self._journal.begin_step(HANDED_BACK)

    def stay(self) -> None:
        """Let the shards take writes again, which were to be handed back."""
        self._each(staging.open_shards)
        self.open_references()

    def set_sequences(self) -> None:
        """Let the source's sequences go on behind its own IDs."""
        numbers.set_sequences(self._sides)

    def reopen_source(self) -> None:
        """Let the source take writes, once it has taken over again."""
        self.reopen()
        self._note_pause()

    def leave_shards(self) -> None:
        """Leave the shards fenced, with their rows, and nothing of the adoption at the source.

        Their barriers stay: the fence stops IDs, and not writes.
        """
        self.drop_barrier()
        self.drop_back()
        self.unstage()

    def finish(self) -> None:
        """End the way back: the shards are on their own, and the source, if still there, stays closed."""
        self._each(way_back.dismantle)
        self._each(staging.drop_barriers)
        self.unstage()
        names = ", ".join(way_back.back_name(taker) for taker in self._sides.takers)
        self._at_source_if_there(self._unfollow, left=_BACK_LEFT.format(names=names))

    def _unfollow(self) -> None:
        relay.leave_source(self._sides, self._on_event)
        # Whoever repaired a row there may have disabled a trigger.
        self.make_barrier()
        for taker in self._sides.takers:
            way_back.unfollow(self._sides, taker)

    def _rules(self, *, directory: str) -> list[OldIdRule]:
        """Return the rules for old IDs, by the tables of a shard: the source may be gone."""
        rules = {**_RULES, OldIds.DIRECTORY: directory}
        taker = self._sides.takers[0]
        schema = schema_name(self._sides.cluster.schema_prefix, taker.shards[0])
        bare = self.bare_names
        with taker.side.engine.connect() as connection:
            here = read_definitions(connection, [quoted(schema, name) for name in bare])
        return [
            OldIdRule(table=name, column=table.id, rule=rules[table.old_ids])
            for table, name in zip(self._sides.split, bare, strict=True)
            if table.id is not None
            and table.old_ids is not None
            and here[quoted(schema, name)].columns[table.id].family == "integer"
        ]

    def _each(self, act: Callable[[Taker], None]) -> None:
        """Do something on all nodes at once; raise the first failure when all have ended."""
        with ThreadPoolExecutor(len(self._sides.takers)) as pool:
            for done in [pool.submit(act, taker) for taker in self._sides.takers]:
                done.result()

    def _note_pause(self) -> None:
        if self._stopped is not None:
            self.pause_ms = (time.monotonic() - self._stopped) * 1000

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(attempt=attempt, reason=reason))


def _keeps_back(actions: Actions) -> bool:
    return actions.keeps_back


Steps = tuple[Step[Actions], ...]

RUN: Final[Steps] = (
    Step(name="close", act=Actions.close, undo=Actions.give_back),
    Step(name="stage", act=Actions.stage, undo=Actions.unstage),
    Step(name="relay", act=Actions.make_relay, undo=Actions.unmake_relay),
    Step(name="copy to relay", act=Actions.copy_to_relay),
    Step(name="place", act=Actions.place_rows),
    Step(name="publish", act=Actions.publish, undo=Actions.unpublish),
    Step(name="subscribe", act=Actions.subscribe, undo=Actions.unsubscribe),
    Step(name="copy", act=Actions.await_copy),
    Step(name="indexes", act=Actions.make_indexes),
    Step(name="compare", act=Actions.compare),
)
"""What brings the rows. Afterwards the nodes follow the source: step ``follow``."""

UNFOLLOWED: Final[Steps] = RUN[: [step.name for step in RUN].index("copy")]
"""The steps before nodes follow the relay, and that which lets them."""

SWITCH: Final[Steps] = (
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(name="way back", act=Actions.prepare_back, undo=Actions.drop_back, is_needed=_keeps_back),
    Step(name="catch up", act=Actions.catch_up),
    # By the journal's entry the shards take over: the source takes writes before it, they do after it.
    Step(name="switch", act=Actions.switch, undo=Actions.reopen, back_to="catch up"),
)
"""The steps that make the shards take over."""

AFTER: Final[Steps] = (
    # Repeated once a client has written to the shards, this would lose the write: it ends before they open.
    Step(name="begin", act=Actions.begin_back, is_needed=_keeps_back),
    Step(name="open", act=Actions.open_shards),
    Step(name="old ids", act=Actions.list_old_ids),
    Step(name="clean", act=Actions.clean),
    Step(name="follow back", act=Actions.follow_back, is_needed=_keeps_back),
)
"""The steps after they have. With a way back the source then follows the shards: step ``kept``."""

BACK: Final[Steps] = (
    Step(name="guard", act=Actions.guard),
    Step(name="draw near", act=Actions.approach),
    # By the journal's entry the source takes over again.
    Step(name="hand back", act=Actions.hand_back, undo=Actions.stay, back_to=KEPT),
)
"""The steps that make the source take over again."""

AFTER_BACK: Final[Steps] = (
    Step(name=HANDED_BACK, act=Actions.set_sequences),
    Step(name="reopen", act=Actions.reopen_source),
    Step(name="leave", act=Actions.leave_shards),
)
"""The steps after it has. Afterwards the shards are fenced, with their rows: step ``returned``."""

FOLLOW_BACK: Final[Steps] = AFTER[-1:]
"""The last of them, which a way back needs the source for."""

END: Final[Steps] = (Step(name=FINISH, act=Actions.finish),)
"""What gives the way back up."""


def uses_relay(adoption: Adoption) -> bool:
    """Return whether an adoption still has objects on its relay: the step that drops them is not over."""
    left = [step.name for step in AFTER if step.act != Actions.follow_back]
    return adoption.switched_at is None or adoption.step in left


def is_at(step: str, *tables: Steps) -> bool:
    """Return whether a step is in one of the tables."""
    return any(step == one.name for table in tables for one in table)
