"""The steps of a move, as two tables: what each does, what undoes it, and whether it stops writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.skipped import bring
from shardids.errors import ClusterConflict, ConnectionFailed, StatementFailed
from shardids.mover import barrier, cutover, programs, replication, requirements
from shardids.mover.beside import Beside
from shardids.mover.cutover import Handover, Terms
from shardids.mover.events import Lagging, OnEvent, Waiting
from shardids.mover.following import ReferencesOfTarget
from shardids.mover.history import LAST_STEP
from shardids.mover.journal import Journal
from shardids.mover.options import Options
from shardids.mover.programs import Scripts
from shardids.mover.sides import RowComparison, Sides

_SCHEMA_FRESH_S: Final = 60.0
"""How long a schema that was read counts as current for making the copy."""
_BRIEF_S: Final = 10.0
"""The longest pause before which a transaction is opened on the target, to be idle until it is needed."""
_ACTIVATION_S: Final = 20.0
"""How long the mover keeps trying to activate a target that is already the owner."""
_NAMED: Final = 5
"""How many changed objects a message names at most."""


class Actions:
    """Takes and undoes the steps of one move, and keeps what one step finds out for the next.

    Every method that is in the tables below is idempotent.

    Attributes:
        comparison: the comparison of all rows, once it has begun.
        left_behind: the target, if it did not answer when a step was undone there.
        pause_ms: how long the shard took no writes, once the target takes them.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        sides: Sides,
        references: ReferencesOfTarget,
        name: str,
        options: Options,
        on_event: OnEvent,
        kept: ExitStack,
        scripts: Scripts | None,
    ) -> None:
        self.comparison: RowComparison | None = None
        self.left_behind: str | None = None
        self.pause_ms: float | None = None
        self._move = journal.move
        self._journal = journal
        self._sides = sides
        self._references = references
        self._name = name
        self._options = options
        self._on_event = on_event
        self._kept = kept
        self._schema = (time.monotonic(), scripts) if scripts else None
        self._known_version: str | None = None
        self._handover: Handover | None = None
        self._high_water_tick = -1
        self._activation: Connection | None = None
        self._analysis: Beside | None = None

    def make_tables(self) -> None:
        """Creates the schema on the target, and keeps its definition in the journal."""
        scripts = self._scripts()
        if not replication.is_begun(self._sides):
            requirements.require_trusted(self._sides, self._options.trusted)
            self._journal.keep_schema(scripts.text)
        if ranges := self._journal.skipped():
            with self._sides.target.begin() as target:
                bring(target, ranges)
        replication.make_tables(self._sides, scripts)

    def drop_copy(self) -> None:
        """Drops what the move created on the target."""

        def drop() -> None:
            with self._sides.target.begin() as target:
                if replication.arrived(target, self._move.shard) is not None:
                    target.execute(text("select shardids.drop_copy(:shard)"), {"shard": self._move.shard})

        self._unless_gone(drop)

    def _unless_gone(self, undo: Callable[[], None]) -> None:
        """Undoes something on the target, or leaves it there if the target does not answer."""
        if self.left_behind is None:
            try:
                undo()
            except ConnectionFailed:
                self.left_behind = self._move.target

    def publish(self) -> None:
        """Publishes the tables on the source."""
        replication.publish(self._sides, self._name)

    def unpublish(self) -> None:
        """Drops the slot and the publication on the source."""
        replication.unpublish(self._sides.source, self._name)

    def subscribe(self) -> None:
        """Subscribes the target to the source."""
        try:
            replication.subscribe(self._sides, self._name)
        except StatementFailed:
            # A table that was made on the source since the schema was read, for example by a migration.
            self._refuse_other_schema(programs.schema_of_source(self._sides))
            raise

    def unsubscribe(self) -> None:
        """Drops the subscription on the target."""
        self._unless_gone(lambda: replication.unsubscribe(self._sides.target, self._name))

    def await_copy(self) -> None:
        """Waits until the target has all rows, as of one moment."""
        replication.await_rows(self._sides, self._name, self._on_event)
        cutover.await_one_moment(self._sides, self._name, self._on_lag)

    def copy_offline(self) -> None:
        """Copies all rows by pg_dump."""
        replication.copy_offline(self._sides)

    def make_rest(self) -> None:
        """Creates indexes, foreign keys and triggers on the target, and begins to gather statistics."""
        scripts = self._scripts()
        self._refuse_other_schema(scripts)
        replication.make_rest(self._sides, scripts)
        self._analysis = self._begin_analysis()
        if self._move.offline:
            self._analysis.wait()

    def _begin_analysis(self) -> Beside:
        shard = self._move.shard
        analysis = Beside(self._sides.target, lambda target: replication.analyze(target, shard))
        self._kept.callback(analysis.cancel)
        return analysis

    def make_barrier(self) -> None:
        """Creates the write barrier on the source, open."""
        barrier.make_barrier(self._sides, self._on_wait)

    def drop_barrier(self) -> None:
        """Drops the write barrier on the source."""
        barrier.drop_barrier(self._sides.source, self._move.shard)

    def catch_up(self) -> None:
        """Waits until the target is close enough to the source for a short cutover."""
        analysis = self._analysis or self._begin_analysis()
        self._schema_version()
        analysis.wait()
        self._references.require()
        cutover.catch_up(self._sides, self._name, self._options.max_pause_s, self._on_lag)

    def cut_over(self) -> None:
        """Stops writes on the source, and waits until the target has all of them."""
        offline = self._move.offline
        # A longer one would outlast the transaction, which the server ends when it is idle.
        is_brief = not offline and self._options.max_pause_s <= _BRIEF_S
        terms = Terms(
            name=None if offline else self._name,
            max_pause_s=self._options.max_pause_s,
            references=self._references,
            version=self._schema_version,
            # Offline the rows are still to come.
            prepare=self._open_activation if is_brief else (lambda: None),
            take=(lambda _handover: None) if offline else self._begin_activation,
            give_back=self.end_activation,
        )
        self._handover = cutover.stop_writes(self._sides, terms, self._on_wait)

    def reopen_source(self) -> None:
        """Lets the source take writes again."""
        cutover.reopen_source(self._sides)

    def activate(self) -> None:
        """Activates the shard on the target in a transaction that stays open."""
        if self._options.verify:
            self.comparison = self._kept.enter_context(RowComparison(self._sides))
        if self._activation is None:
            self._begin_activation(self._handover)
        self._kept.callback(self.end_activation)

    def _begin_activation(self, handover: Handover | None) -> None:
        if handover is None:
            with self._sides.source.autocommit() as source:
                handover = cutover.read_handover(source, self._sides, time.monotonic())
        self._high_water_tick = handover.high_water_tick
        activation = self._activation or self._open_activation()
        cutover.complete_activation(activation, self._sides, handover)

    def _open_activation(self) -> Connection:
        self._activation = cutover.open_activation(self._sides)
        return self._activation

    def end_activation(self) -> None:
        """Ends the open transaction that activates the target, and rolls it back unless it was committed."""
        if self._activation is not None:
            self._activation.close()
            self._activation = None

    def place(self) -> None:
        """Makes the target the owner in the catalog, then commits its activation."""
        if self._activation is not None:
            self._activation.execute(text("select 1"))  # A silent target must not become the owner.
        self._journal.switch_placement(self._high_water_tick)
        self._make_active()
        if self._handover is not None:
            self.pause_ms = (time.monotonic() - self._handover.since) * 1000

    def _make_active(self) -> None:
        """Commits the target's activation; if that transaction was lost, activates the target again."""
        deadline = time.monotonic() + _ACTIVATION_S
        while True:
            try:
                if self._activation is None and not cutover.is_active(self._sides):
                    self._begin_activation(self._handover)
                if self._activation is not None:
                    self._activation.commit()
                return
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
            finally:
                self.end_activation()
            time.sleep(0.5)

    def clean(self) -> None:
        """Makes sure that the target is active, and drops the subscription, the slot and the publication."""
        self._make_active()
        if not self._move.offline:
            replication.unsubscribe(self._sides.target, self._name)
            self.unpublish()

    def _scripts(self) -> Scripts:
        if self._schema is None or time.monotonic() - self._schema[0] > _SCHEMA_FRESH_S:
            self._schema = (time.monotonic(), programs.schema_of_source(self._sides))
        return self._schema[1]

    def _schema_version(self) -> str:
        """Returns the version of the source's schema, which the target was given.

        pg_dump takes a second, so it runs only when the version has changed.

        Raises:
            ClusterConflict: the schema was changed during the move.
        """
        with self._sides.source.autocommit() as source:
            version: str = source.execute(
                text("select shardids.schema_version(:shard)"), {"shard": self._move.shard}
            ).scalar_one()
        if version != self._known_version:
            self._refuse_other_schema(programs.schema_of_source(self._sides))
            self._known_version = version
        return version

    def _refuse_other_schema(self, scripts: Scripts) -> None:
        changed = programs.changed_objects(self._journal.schema() or "", scripts.text)
        if changed:
            shard = self._move.shard
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ClusterConflict(
                f"shard {shard}: {', '.join(changed[:_NAMED])}{more} was changed while it was moved",
                hint=f"Undo the move with shardids shard move {shard} --abort, then start it again.",
            )

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(shard=self._move.shard, lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(shard=self._move.shard, attempt=attempt, reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of a move. ``act`` and ``undo`` are idempotent.

    Attributes:
        name: the step's name in the journal.
        act: takes the step.
        undo: removes whatever the step has done; ``None`` if undoing the other steps leaves nothing of it.
        stops_writes: the source takes no writes during this step.
        journaled: whether the journal records the step. The journal counts a step that it does not record
            as part of the step before. Such a step is part of the pause, and when it is repeated it finds
            its own work done.
    """

    name: str
    act: Callable[[Actions], None]
    undo: Callable[[Actions], None] | None = None
    stops_writes: bool = False
    journaled: bool = True


# fmt: off
LIVE: Final = (
    Step(name="tables", act=Actions.make_tables, undo=Actions.drop_copy),
    Step(name="publish", act=Actions.publish, undo=Actions.unpublish),
    Step(name="subscribe", act=Actions.subscribe, undo=Actions.unsubscribe),
    Step(name="copy", act=Actions.await_copy),
    Step(name="indexes", act=Actions.make_rest),
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(name="catch up", act=Actions.catch_up),
    Step(name="cutover", act=Actions.cut_over, undo=Actions.reopen_source, stops_writes=True),
    Step(name="activate", act=Actions.activate, stops_writes=True, journaled=False),
    # The switch of the placement: the source owns the shard before it, the target after it.
    Step(name="place", act=Actions.place, stops_writes=True, journaled=False),
    Step(name=LAST_STEP, act=Actions.clean),
)
"""A move by logical replication."""

OFFLINE: Final = (
    Step(name="tables", act=Actions.make_tables, undo=Actions.drop_copy),
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(name="stop", act=Actions.cut_over, undo=Actions.reopen_source, stops_writes=True),
    Step(name="copy", act=Actions.copy_offline, stops_writes=True),
    Step(name="indexes", act=Actions.make_rest, stops_writes=True),
    Step(name="activate", act=Actions.activate, stops_writes=True, journaled=False),
    Step(name="place", act=Actions.place, stops_writes=True, journaled=False),
    Step(name=LAST_STEP, act=Actions.clean),
)
"""A move by pg_dump, with writes stopped from ``stop`` on."""
# fmt: on
