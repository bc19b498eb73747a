"""One move under way: takes its steps in order, recovers when one fails, and undoes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

from shardids.catalog.connections import on_connect
from shardids.catalog.rows import Catalog
from shardids.errors import CommitUncertain, ConnectionFailed, MoveFailed, ShardidsError
from shardids.mover import cutover
from shardids.mover.events import OnEvent, Result, StepBegun, StepDone
from shardids.mover.following import ReferencesOfTarget
from shardids.mover.history import ABORT, LAST_STEP, Outcome
from shardids.mover.journal import Journal
from shardids.mover.logged import MoveLog
from shardids.mover.options import Options
from shardids.mover.programs import Scripts
from shardids.mover.sides import Directory, Sides, refuse_other_copy
from shardids.mover.steps import LIVE, OFFLINE, Actions, Step
from shardids.views import follow


class Mover:
    """One move and the means to take its steps. :meth:`opened` makes it."""

    def __init__(
        self,
        *,
        journal: Journal,
        sides: Sides,
        name: str,
        actions: Actions,
        log: MoveLog,
        refresh_views: Callable[[], tuple[str, ...]],
    ) -> None:
        self._move = journal.move
        self._steps = OFFLINE if journal.move.offline else LIVE
        self._journal = journal
        self._sides = sides
        self._name = name
        self._actions = actions
        self._log = log
        self._refresh_views = refresh_views
        self._started = time.monotonic()

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
        """Yields a mover for the journal's move; ``scripts`` is the shard's schema, if it was just read."""
        move = journal.move
        name = move.session_name(directory.cluster)
        log = MoveLog(move, on_event)
        with ExitStack() as kept:
            kept.enter_context(log.watching())
            sides = kept.enter_context(directory.sides(move.shard, move.source, move.target, name=name))
            # A process that slept, and lost the lock, finds its sessions ended. It is not to open others.
            for side in (sides.source, sides.target):
                on_connect(side.engine, lambda *_: journal.require_lock())
            following = ReferencesOfTarget.opened(catalog, directory, move.target, name=name)
            actions = Actions(
                journal=journal,
                sides=sides,
                references=kept.enter_context(following),
                name=name,
                options=options,
                on_event=log,
                kept=kept,
                scripts=scripts,
            )
            yield cls(
                journal=journal,
                sides=sides,
                name=name,
                actions=actions,
                log=log,
                refresh_views=lambda: follow(catalog),
            )

    def end_former_sessions(self) -> None:
        """Ends sessions that a killed mover may have left running, those of its pg_dump and psql included."""
        self._sides.source.end_sessions(self._name)
        with suppress(ConnectionFailed):  # Steps that need the target will report it.
            self._sides.target.end_sessions(self._name)

    def refuse_promoted_target(self) -> None:
        """Refuses a target whose standby was promoted after the copy was begun.

        Raises:
            MoveRefused: a standby was promoted.
        """
        refuse_other_copy(self._sides, is_begun=self._journal.step != self._steps[0].name)

    def run(self) -> Result:
        """Takes the steps from the one that the journal is at to the last."""
        shard, journal = self._move.shard, self._journal
        names = [step.name for step in self._steps]
        for step in self._steps[names.index(journal.step) :]:
            if journal.step != step.name and step.journaled:
                journal.begin_step(step.name)
            self._log(StepBegun(shard=shard, step=step.name))
            try:
                step.act(self._actions)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._log(StepDone(shard=shard, step=step.name))
        stale_views = self._refresh_views()
        journal.end("moved")
        return self._result("moved", stale_views=stale_views)

    def undo(self) -> Result:
        """Makes the source the shard's only owner, and removes what the move has created.

        A target that does not answer is left as it is: it was never activated before the switch.
        """
        self._journal.begin_step(ABORT)
        self._log(StepBegun(shard=self._move.shard, step=ABORT))
        for step in reversed(self._steps):
            if step.undo is not None:
                step.undo(self._actions)
        self._log(StepDone(shard=self._move.shard, step=ABORT))
        self._journal.end("aborted")
        return self._result("aborted")

    def _recover(self, step: Step, error: BaseException) -> None:
        """Lets the source take writes again if the failed step had stopped them."""
        if not step.stops_writes:
            return
        self._actions.end_activation()
        try:
            if self._is_placed(step, error):
                return
            cutover.reopen_source(self._sides)
            # If the catalog is out of reach, the journal stays at this step.
            with suppress(ConnectionFailed):
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
        """Returns whether the placement was switched: after an unanswered COMMIT it asks the catalog.

        An interrupt, too, may have come before the answer.
        """
        is_switched = self._journal.step == LAST_STEP
        is_unknown = isinstance(error, CommitUncertain) or not isinstance(error, Exception)
        if step.name == "place" and not is_switched and is_unknown:
            return self._journal.settle()
        return is_switched

    def _result(self, outcome: Outcome, *, stale_views: tuple[str, ...] = ()) -> Result:
        comparison = self._actions.comparison
        result = Result(
            shard=self._move.shard,
            source=self._move.source,
            target=self._move.target,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._actions.pause_ms,
            rows_verified=comparison.rows() if comparison and outcome == "moved" else None,
            left_behind=self._actions.left_behind,
            stale_views=stale_views,
        )
        self._log.ended(result)
        return result
