"""The steps of a move; each can be repeated and undone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.leases import OnBusy
from shardids.catalog.moves import LAST_STEP, PLACE
from shardids.catalog.skipped import bring
from shardids.errors import ClusterConflict, ConnectionFailed, StatementFailed
from shardids.mover import cutover, requirements
from shardids.mover.cutover import Beside, Handover, ReferencesOfTarget, Terms
from shardids.mover.journal import Journal
from shardids.replication import barrier, programs, subscriptions
from shardids.replication.barrier import BarrierSession
from shardids.replication.programs import Scripts
from shardids.replication.sides import RowComparison, Sides
from shardids.replication.steps import Lagging, OnEvent, Step, Waiting

MAX_PAUSE_S: Final = 2.0
"""How long writes to a shard may be stopped, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a shard is moved.

    Attributes:
        offline: copy the shard by pg_dump, with writes stopped from start to end.
        verify: compare all rows of both copies afterwards.
        max_pause_s: how long writes may be stopped; ``offline`` moves ignore it.
        trusted: roles whose code may run as the role that moves: see :mod:`shardids.pg.schemas`.
        on_busy: what to do while another command has the shard's lease.
        automatic: whether the journal says that ``rebalance --watch`` began the move.
    """

    offline: bool = False
    verify: bool = False
    max_pause_s: float = MAX_PAUSE_S
    trusted: tuple[str, ...] = ()
    on_busy: OnBusy = OnBusy.WAIT
    automatic: bool = False


DEFAULTS: Final = Options()

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
        pause_ms: how long writers waited, from the lock on the source until the target took writes.
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
        self._barrier: BarrierSession | None = None
        self._analysis: Beside | None = None

    def make_tables(self) -> None:
        """Create the schema on the target, and keep its definition in the journal."""
        scripts = self._scripts()
        if not subscriptions.is_begun(self._sides):
            requirements.require_trusted(self._sides, self._options.trusted)
            self._journal.keep_schema(scripts.text)
        if ranges := self._journal.skipped():
            with self._sides.target.begin() as target:
                bring(target, ranges)
        subscriptions.make_tables(self._sides, scripts)

    def drop_copy(self) -> None:
        """Drop the objects that the move created on the target."""

        def drop() -> None:
            with self._sides.target.begin() as target:
                if subscriptions.arrived(target, self._move.shard) is not None:
                    target.execute(text("select shardids.drop_copy(:shard)"), {"shard": self._move.shard})

        self._unless_gone(drop)

    def _unless_gone(self, undo: Callable[[], None]) -> None:
        """Undo something on the target, or leave it there if the target does not answer."""
        if self.left_behind is None:
            try:
                undo()
            except ConnectionFailed:
                self.left_behind = self._move.target

    def publish(self) -> None:
        """Publish the tables on the source."""
        subscriptions.publish(self._sides, self._name)

    def unpublish(self) -> None:
        """Drop the slot and the publication on the source."""
        subscriptions.unpublish(self._sides.source, self._name)

    def subscribe(self) -> None:
        """Subscribe the target to the source."""
        try:
            subscriptions.subscribe(self._sides, self._name)
        except StatementFailed:
            # A table that was made on the source since the schema was read, for example by a migration.
            self._refuse_other_schema(programs.definition_of_source(self._sides))
            raise

    def unsubscribe(self) -> None:
        """Drop the subscription on the target."""
        self._unless_gone(lambda: subscriptions.unsubscribe(self._sides.target, self._name))

    def await_copy(self) -> None:
        """Wait until the target has all rows, as of one moment."""
        subscriptions.await_rows(self._sides, self._name, self._on_event)
        cutover.await_one_moment(self._sides, self._name, self._on_lag)

    def copy_offline(self) -> None:
        """Copy all rows by pg_dump."""
        subscriptions.copy_offline(self._sides)

    def make_rest(self) -> None:
        """Create indexes, foreign keys and triggers on the target, and begin to gather statistics."""
        scripts = self._scripts()
        self._refuse_other_schema(scripts.text)
        # What clients open in the pause lengthens it, so they begin well before.
        self._journal.announce()
        subscriptions.make_rest(self._sides, scripts)
        self._analysis = self._begin_analysis()
        if self._move.offline:
            self._analysis.wait()

    def _begin_analysis(self) -> Beside:
        shard = self._move.shard
        analysis = Beside(self._sides.target, lambda target: subscriptions.analyze(target, shard))
        self._kept.callback(analysis.cancel)
        return analysis

    def make_barrier(self) -> None:
        """Create the write barrier on the source, open."""
        barrier.make_barrier(self._sides, self._on_wait)

    def drop_barrier(self) -> None:
        """Drop the write barrier on the source."""
        barrier.drop_barrier(self._sides.source, self._move.shard)

    def catch_up(self) -> None:
        """Wait until the target is close enough to the source for a short cutover."""
        analysis = self._analysis or self._begin_analysis()
        # Once more: making indexes may have taken hours, and a resumed move begins here.
        self._journal.announce()
        self._schema_version()
        analysis.wait()
        self._references.require()
        cutover.catch_up(self._sides, self._name, self._options.max_pause_s, self._on_lag)

    def cut_over(self) -> None:
        """Stop writes on the source, and wait until the target has all of them."""
        offline = self._move.offline
        # A longer one would outlast the transaction, which the server ends when it is idle.
        is_brief = not offline and self._options.max_pause_s <= _BRIEF_S
        terms = Terms(
            name=None if offline else self._name,
            max_pause_s=self._options.max_pause_s,
            references=self._references,
            version=self._schema_version,
            prepare=lambda barrier: self._prepare(barrier, opens=is_brief),
            # Offline the rows are still to come.
            take=(lambda _handover: self._release()) if offline else self._begin_activation,
            give_back=self.give_back,
        )
        self._kept.callback(self.give_back)
        self._handover = cutover.stop_writes(self._sides, terms, self._on_wait)

    def _prepare(self, barrier: BarrierSession, *, opens: bool) -> None:
        self._barrier = barrier
        if opens:
            self._open_activation()

    def give_back(self) -> None:
        """Roll back the target's activation unless it was committed, and lets writers on the source pass."""
        self.end_activation()
        self._release()

    def _release(self) -> None:
        if self._barrier is not None:
            self._barrier.release()
            self._barrier = None

    def reopen_source(self) -> None:
        """Let the source take writes again."""
        cutover.reopen_source(self._sides)
        self.give_back()

    def activate(self) -> None:
        """Activate the shard on the target in a transaction that stays open."""
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
        """End the open transaction that activates the target, and rolls it back unless it was committed."""
        if self._activation is not None:
            self._activation.close()
            self._activation = None

    def place(self) -> None:
        """Make the target the owner in the catalog, then commits its activation."""
        if self._activation is not None:
            self._activation.execute(text("select 1"))  # A silent target must not become the owner.
        self._journal.switch_placement(self._high_water_tick)
        self._make_active()
        self._release()
        if self._handover is not None:
            self.pause_ms = (time.monotonic() - self._handover.since) * 1000

    def _make_active(self) -> None:
        """Commit the target's activation; if that transaction was lost, activates the target again."""
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
        """Make sure that the target is active, and drop the subscription, the slot and the publication."""
        self._make_active()
        if not self._move.offline:
            subscriptions.unsubscribe(self._sides.target, self._name)
            self.unpublish()

    def _scripts(self) -> Scripts:
        if self._schema is None or time.monotonic() - self._schema[0] > _SCHEMA_FRESH_S:
            self._schema = (time.monotonic(), programs.schema_of_source(self._sides))
        return self._schema[1]

    def _schema_version(self) -> str:
        """Return the version of the source's schema, which the target was given.

        pg_dump takes a second, so it runs only when the version has changed.

        Raises:
            ClusterConflict: the schema was changed during the move.
        """
        with self._sides.source.autocommit() as source:
            version: str = source.execute(
                text("select shardids.schema_version(:shard)"), {"shard": self._move.shard}
            ).scalar_one()
        if version != self._known_version:
            self._refuse_other_schema(programs.definition_of_source(self._sides))
            self._known_version = version
        return version

    def _refuse_other_schema(self, definition: str) -> None:
        changed = programs.changed_objects(self._journal.schema() or "", definition)
        if changed:
            shard = self._move.shard
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ClusterConflict(
                f"shard {shard}: {', '.join(changed[:_NAMED])}{more} was changed while it was moved",
                hint=f"Undo the move with shardids shard move {shard} --abort, then start it again.",
            )

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(attempt=attempt, reason=reason))


_BEFORE_PAUSE: Final = "catch up"

# fmt: off
LIVE: Final[tuple[Step[Actions], ...]] = (
    Step(name="tables", act=Actions.make_tables, undo=Actions.drop_copy),
    Step(name="publish", act=Actions.publish, undo=Actions.unpublish),
    Step(name="subscribe", act=Actions.subscribe, undo=Actions.unsubscribe),
    Step(name="copy", act=Actions.await_copy),
    Step(name="indexes", act=Actions.make_rest),
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(name=_BEFORE_PAUSE, act=Actions.catch_up),
    Step(name="cutover", act=Actions.cut_over, undo=Actions.reopen_source, back_to=_BEFORE_PAUSE),
    Step(name="activate", act=Actions.activate, back_to=_BEFORE_PAUSE, is_journaled=False),
    # The switch of the placement: the source owns the shard before it, the target after it.
    Step(name=PLACE, act=Actions.place, back_to=_BEFORE_PAUSE, is_journaled=False),
    Step(name=LAST_STEP, act=Actions.clean),
)
"""A move by logical replication."""

OFFLINE: Final[tuple[Step[Actions], ...]] = (
    Step(name="tables", act=Actions.make_tables, undo=Actions.drop_copy),
    Step(name="barrier", act=Actions.make_barrier, undo=Actions.drop_barrier),
    Step(name="stop", act=Actions.cut_over, undo=Actions.reopen_source, back_to=_BEFORE_PAUSE),
    Step(name="copy", act=Actions.copy_offline, back_to=_BEFORE_PAUSE),
    Step(name="indexes", act=Actions.make_rest, back_to=_BEFORE_PAUSE),
    Step(name="activate", act=Actions.activate, back_to=_BEFORE_PAUSE, is_journaled=False),
    Step(name=PLACE, act=Actions.place, back_to=_BEFORE_PAUSE, is_journaled=False),
    Step(name=LAST_STEP, act=Actions.clean),
)
"""A move by pg_dump, with writes stopped from ``stop`` on; a failure from there on ends the move."""
# fmt: on
