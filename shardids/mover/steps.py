"""The steps of a move, as one table: what each does, what undoes it, and whether it stops writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from sqlalchemy import Connection, text

from shardids import views
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, CommitUncertain, ConnectionFailed, MoveFailed, ShardidsError
from shardids.mover import barrier, cutover, programs, replication
from shardids.mover.cutover import Handover
from shardids.mover.events import Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.journal import ABORT, LAST_STEP, Journal, Outcome
from shardids.mover.programs import Scripts
from shardids.mover.sides import Directory, RowComparison, Sides, refuse_other_copy

MAX_PAUSE_S: Final = 2.0
"""How long a shard may take no writes, unless the caller says otherwise."""
_SCHEMA_FRESH_S: Final = 60.0
_ACTIVATION_S: Final = 20.0
"""How long a target is tried to be activated that is the owner already."""
_NAMED: Final = 5
"""Changed objects that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a shard is moved.

    Attributes:
        offline: by pg_dump, with writes stopped all the while.
        verify: compare all rows afterwards.
        max_pause_s: how long the shard may take no writes; does not hold for ``offline``.
    """

    offline: bool = False
    verify: bool = False
    max_pause_s: float = MAX_PAUSE_S


DEFAULTS: Final = Options()


class Mover:
    """One move and the means to take its steps; made by :meth:`opened`."""

    def __init__(
        self,
        *,
        journal: Journal,
        sides: Sides,
        name: str,
        options: Options,
        on_event: OnEvent,
        kept: ExitStack,
        refresh_views: Callable[[], tuple[str, ...]],
    ) -> None:
        self.sides = sides
        self.name = name
        """Of publication, subscription, slot and sessions."""
        self._move = journal.move
        self._steps = OFFLINE if journal.move.offline else LIVE
        self._journal = journal
        self._options = options
        self._on_event = on_event
        self._kept = kept
        self._refresh_views = refresh_views
        self._schema: tuple[float, Scripts] | None = None
        self._started = time.monotonic()
        self._handover: Handover | None = None
        self._pause_ms: float | None = None
        self._comparison: RowComparison | None = None
        self._left_behind: str | None = None
        self._known_version: str | None = None
        self._activation: Connection | None = None

    @classmethod
    @contextmanager
    def opened(
        cls,
        catalog: Catalog,
        directory: Directory,
        journal: Journal,
        *,
        options: Options,
        on_event: OnEvent,
        scripts: Scripts | None = None,
    ) -> Iterator[Self]:
        """For the journal's move; ``scripts`` are the shard's schema, if it was just read."""
        move = journal.move
        # On servers of many clusters, no two moves have one name.
        name = f"shardids_move_{directory.cluster.hex[:8]}_{move.id}_{move.shard}"
        with ExitStack() as kept:
            sides = kept.enter_context(directory.sides(move.shard, move.source, move.target, name=name))
            mover = cls(
                journal=journal,
                sides=sides,
                name=name,
                options=options,
                on_event=on_event,
                kept=kept,
                refresh_views=lambda: views.follow_placement(catalog),
            )
            if scripts:
                mover._schema = (time.monotonic(), scripts)
            yield mover

    def end_former_sessions(self) -> None:
        """Ends what a mover that was killed may have left at work, its pg_dump and psql included."""
        self.sides.source.end_sessions(self.name)
        with suppress(ConnectionFailed):  # Then it has none; what needs the target will say so.
            self.sides.target.end_sessions(self.name)

    def refuse_promoted_target(self) -> None:
        """Refuses a target whose standby has taken over since the copy was begun.

        Raises:
            MoveRefused: it has.
        """
        refuse_other_copy(self.sides, is_begun=self._journal.step != self._steps[0].name)

    def run(self) -> Result:
        """Takes the steps from the journal's present one on."""
        shard, journal = self._move.shard, self._journal
        names = [step.name for step in self._steps]
        for step in self._steps[names.index(journal.step) :]:
            if journal.step != step.name and step.journaled:
                journal.begin_step(step.name)
            self._on_event(StepBegun(shard=shard, step=step.name))
            try:
                step.act(self)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._on_event(StepDone(shard=shard, step=step.name))
        stale_views = self._refresh_views()
        journal.end("moved")
        return self._result("moved", stale_views=stale_views)

    def undo(self) -> Result:
        """Makes the source the shard's only owner, and removes what the move has made.

        A target that does not answer is left alone: before the switch it was never activated.
        """
        self._journal.begin_step(ABORT)
        self._on_event(StepBegun(shard=self._move.shard, step=ABORT))
        for step in reversed(self._steps):
            if step.undo is not None:
                step.undo(self)
        self._on_event(StepDone(shard=self._move.shard, step=ABORT))
        self._journal.end("aborted")
        return self._result("aborted")

    def _make_tables(self) -> None:
        scripts = self._scripts()
        if not replication.is_begun(self.sides):
            self._journal.keep_schema(scripts.text)
        replication.make_tables(self.sides, scripts)

    def _drop_copy(self) -> None:
        def drop() -> None:
            with self.sides.target.begin() as target:
                if replication.arrived(target, self._move.shard) is not None:
                    target.execute(text("select shardids.drop_copy(:shard)"), {"shard": self._move.shard})

        self._unless_gone(drop)

    def _unless_gone(self, undo: Callable[[], None]) -> None:
        """Undoes something on the target, or leaves it there if the target does not answer."""
        if self._left_behind is None:
            try:
                undo()
            except ConnectionFailed:
                self._left_behind = self._move.target

    def _publish(self) -> None:
        replication.publish(self.sides, self.name)

    def _unpublish(self) -> None:
        replication.unpublish(self.sides, self.name)

    def _subscribe(self) -> None:
        replication.subscribe(self.sides, self.name)

    def _unsubscribe(self) -> None:
        self._unless_gone(lambda: replication.unsubscribe(self.sides, self.name))

    def _await_copy(self) -> None:
        replication.await_rows(self.sides, self.name, self._on_event)
        cutover.await_one_moment(self.sides, self.name, self._on_lag)

    def _copy_offline(self) -> None:
        replication.copy_offline(self.sides)

    def _make_rest(self) -> None:
        scripts = self._scripts()
        self._refuse_other_schema(scripts)
        replication.make_rest(self.sides, scripts)

    def _make_barrier(self) -> None:
        barrier.make_barrier(self.sides, self._on_wait)

    def _drop_barrier(self) -> None:
        barrier.drop_barrier(self.sides.source, self._move.shard)

    def _catch_up(self) -> None:
        self._schema_version()
        cutover.catch_up(self.sides, self.name, self._options.max_pause_s, self._on_lag)

    def _cut_over(self) -> None:
        slot = None if self._move.offline else self.name
        pause_s = self._options.max_pause_s
        self._handover = cutover.stop_writes(self.sides, slot, pause_s, self._schema_version, self._on_wait)

    def _reopen_source(self) -> None:
        cutover.reopen_source(self.sides)

    def _activate(self) -> None:
        if self._options.verify:
            self._comparison = self._kept.enter_context(RowComparison(self.sides))
        self._begin_activation()
        self._kept.callback(self._end_activation)

    def _begin_activation(self) -> None:
        handover = self._handover
        if handover is None:
            with self.sides.source.autocommit() as source:
                handover = cutover.read_handover(source, self.sides, time.monotonic())
        self._activation = cutover.begin_activation(self.sides, handover)

    def _end_activation(self) -> None:
        if self._activation is not None:
            self._activation.close()
            self._activation = None

    def _place(self) -> None:
        if self._activation is not None:
            self._activation.execute(text("select 1"))  # A target that is silent must not become the owner.
        self._journal.switch_placement()
        self._make_active()
        if self._handover is not None:
            self._pause_ms = (time.monotonic() - self._handover.since) * 1000

    def _make_active(self) -> None:
        """Commits the activation of the target; activates it anew where that was lost."""
        deadline = time.monotonic() + _ACTIVATION_S
        while True:
            try:
                if self._activation is None and not cutover.is_active(self.sides):
                    self._begin_activation()
                if self._activation is not None:
                    self._activation.commit()
                return
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
            finally:
                self._end_activation()
            time.sleep(0.5)

    def _clean(self) -> None:
        self._make_active()
        if not self._move.offline:
            replication.unsubscribe(self.sides, self.name)
            self._unpublish()

    def _recover(self, step: Step, error: BaseException) -> None:
        """Lets the source take writes again, if a step failed while it took none."""
        if not step.stops_writes:
            return
        self._end_activation()
        try:
            if self._is_placed(step, error):
                return
            cutover.reopen_source(self.sides)
            with suppress(
                ConnectionFailed
            ):  # A catalog that is out of reach: the journal stays at this step.
                if self._move.offline:
                    self.undo()
                else:
                    self._journal.begin_step("catch up")
        except ShardidsError as second:
            raise MoveFailed(
                f"shard {self._move.shard} takes no writes: step {step.name!r} of its move failed ({error}),"
                f" and so did making the source take writes again ({second.message})",
                hint="When the nodes answer again: --resume or --abort.",
            ) from error

    def _is_placed(self, step: Step, error: BaseException) -> bool:
        """Whether the placement was switched. Only an unanswered COMMIT of the catalog leaves that open."""
        is_switched = self._journal.step == LAST_STEP
        if step.name == "place" and not is_switched and isinstance(error, CommitUncertain):
            return self._journal.settle()
        return is_switched

    def _scripts(self) -> Scripts:
        if self._schema is None or time.monotonic() - self._schema[0] > _SCHEMA_FRESH_S:
            self._schema = (time.monotonic(), programs.schema_of_source(self.sides))
        return self._schema[1]

    def _schema_version(self) -> str:
        """The version of the source's schema, which is still what the target was given.

        pg_dump, which takes a second, is asked only when the version has changed.

        Raises:
            ClusterConflict: the schema was changed.
        """
        with self.sides.source.autocommit() as source:
            version: str = source.execute(
                text("select shardids.schema_version(:shard)"), {"shard": self._move.shard}
            ).scalar_one()
        if version != self._known_version:
            self._refuse_other_schema(programs.schema_of_source(self.sides))
            self._known_version = version
        return version

    def _refuse_other_schema(self, scripts: Scripts) -> None:
        changed = programs.changed_objects(self._journal.schema() or "", scripts.text)
        if changed:
            shard = self._move.shard
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ClusterConflict(
                f"shard {shard}: {', '.join(changed[:_NAMED])}{more} was changed while it was moved",
                hint=f"Undo the move with shardids shard move {shard} --abort, then begin it anew.",
            )

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(shard=self._move.shard, lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(shard=self._move.shard, attempt=attempt, reason=reason))

    def _result(self, outcome: Outcome, *, stale_views: tuple[str, ...] = ()) -> Result:
        return Result(
            shard=self._move.shard,
            source=self._move.source,
            target=self._move.target,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._pause_ms,
            rows_verified=self._comparison.rows() if self._comparison and outcome == "moved" else None,
            left_behind=self._left_behind,
            stale_views=stale_views,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of a move. Both functions are idempotent.

    Attributes:
        name: as the journal has it. act: takes the step. undo: removes whatever of it was done; ``None``
        where nothing of it stays once the others are undone. stops_writes: the source takes no writes while
        it is taken. journaled: whether it is written down. One that is not belongs, for the journal, to the
        step before: it
            is a part of the pause, and finds its own work done when it is repeated.
    """

    name: str
    act: Callable[[Mover], None]
    undo: Callable[[Mover], None] | None = None
    stops_writes: bool = False
    journaled: bool = True


# fmt: off
LIVE: Final = (
    Step(name="tables", act=Mover._make_tables, undo=Mover._drop_copy),
    Step(name="publish", act=Mover._publish, undo=Mover._unpublish),
    Step(name="subscribe", act=Mover._subscribe, undo=Mover._unsubscribe),
    Step(name="copy", act=Mover._await_copy),
    Step(name="indexes", act=Mover._make_rest),
    Step(name="barrier", act=Mover._make_barrier, undo=Mover._drop_barrier),
    Step(name="catch up", act=Mover._catch_up),
    Step(name="cutover", act=Mover._cut_over, undo=Mover._reopen_source, stops_writes=True),
    Step(name="activate", act=Mover._activate, stops_writes=True, journaled=False),
    # Ends with the switch: before it the shard is the source's, after it the target's.
    Step(name="place", act=Mover._place, stops_writes=True, journaled=False),
    Step(name=LAST_STEP, act=Mover._clean),
)
"""A move by logical replication."""

OFFLINE: Final = (
    Step(name="tables", act=Mover._make_tables, undo=Mover._drop_copy),
    Step(name="barrier", act=Mover._make_barrier, undo=Mover._drop_barrier),
    Step(name="stop", act=Mover._cut_over, undo=Mover._reopen_source, stops_writes=True),
    Step(name="copy", act=Mover._copy_offline, stops_writes=True),
    Step(name="indexes", act=Mover._make_rest, stops_writes=True),
    Step(name="activate", act=Mover._activate, stops_writes=True, journaled=False),
    Step(name="place", act=Mover._place, stops_writes=True, journaled=False),
    Step(name=LAST_STEP, act=Mover._clean),
)
"""A move by pg_dump, with writes stopped all the while."""
# fmt: on
