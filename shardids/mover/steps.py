"""The steps of a move: what each of them does, what undoes them, what happens when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from sqlalchemy import text

from shardids import views
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed, MoveFailed, ShardidsError
from shardids.mover import checks, copying, cutover, gate, promotion
from shardids.mover.dumping import Scripts
from shardids.mover.events import Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.journal import UNWRITTEN, Journal, Move, Outcome, Step
from shardids.mover.sides import Sides, end_sessions, sides_of
from shardids.mover.verify import Comparison

MAX_PAUSE_S = 2.0
"""How long a shard may take no writes, unless the caller says otherwise."""
_SCHEMA_FRESH_S = 60.0
_WRITES_STOPPED: Mapping[bool, tuple[Step, ...]] = {
    False: ("cutover", "activate", "place"),
    True: ("stop", "copy", "indexes", "activate", "place"),
}
"""Steps during which the source takes no writes, by whether the move is offline."""


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


DEFAULTS = Options()


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
        self._journal = journal
        self._options = options
        self._on_event = on_event
        self._kept = kept
        self._refresh_views = refresh_views
        self._schema: tuple[float, Scripts] | None = None
        self._started = time.monotonic()
        self._stopped_since: float | None = None
        self._pause_ms: float | None = None
        self._comparison: Comparison | None = None

    @classmethod
    @contextmanager
    def opened(
        cls,
        catalog: Catalog,
        journal: Journal,
        options: Options,
        on_event: OnEvent,
        scripts: Scripts | None = None,
    ) -> Iterator[Self]:
        """For the journal's move; ``scripts`` are the shard's schema, if it was just read."""
        move, name = journal.move, name_of(catalog, journal.move)
        with ExitStack() as kept:
            sides = sides_of(catalog, move.shard, move.source, move.target, name=name)
            kept.callback(sides.close)
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
        end_sessions(self.sides.source, self.name)
        with suppress(ConnectionFailed):  # Then it has none; what needs the target will say so.
            end_sessions(self.sides.target, self.name)

    def refuse_promoted_target(self) -> None:
        """Refuses a target whose standby has taken over since the copy was begun.

        Raises:
            MoveRefused: it has.
        """
        is_begun = self._journal.step != self._move.steps[0]
        with self.sides.target.autocommit() as target:
            promotion.refuse_other_copy(target, self.sides, is_begun=is_begun)

    def run(self) -> Result:
        """Takes the steps from the journal's present one on."""
        move, journal = self._move, self._journal
        for step in move.steps[move.steps.index(journal.step) :]:
            if journal.step != step and step not in UNWRITTEN:
                journal.begin_step(step)
            self._on_event(StepBegun(shard=move.shard, step=step))
            try:
                self._take(step)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._on_event(StepDone(shard=move.shard, step=step))
        stale_views = self._refresh_views()
        journal.end("moved")
        rows = self._comparison.rows() if self._comparison else None
        return self._result("moved", rows_verified=rows, stale_views=stale_views)

    def undo(self) -> Result:
        """Makes the source the shard's only home, and removes what the move has made.

        A target that does not answer is left alone, if it was never activated.
        """
        move, sides = self._move, self.sides
        self._journal.begin_step("abort")
        self._on_event(StepBegun(shard=move.shard, step="abort"))
        left_behind = None
        try:
            cutover.take_back(sides)
            copying.unsubscribe(sides, self.name)
        except ConnectionFailed:
            if cutover.was_cut_over(sides):
                raise
            left_behind = move.target
            cutover.reopen_source(sides)
        gate.drop_gate(sides.source, move.shard)
        copying.unpublish(sides, self.name)
        if left_behind is None:
            with sides.target.engine.begin() as target:
                if copying.arrived(target, move.shard) is not None:
                    target.execute(text("select shardids.drop_copy(:shard)"), {"shard": move.shard})
        self._on_event(StepDone(shard=move.shard, step="abort"))
        self._journal.end("aborted")
        return self._result("aborted", left_behind=left_behind)

    def _take(self, step: Step) -> None:
        if self._move.offline and step in ("copy", "clean"):
            if step == "copy":
                copying.copy_offline(self.sides)
            return
        sides, name = self.sides, self.name
        actions: Mapping[Step, Callable[[], None]] = {
            "tables": lambda: copying.make_tables(sides, self._scripts()),
            "publish": lambda: copying.publish(sides, name),
            "subscribe": lambda: copying.subscribe(sides, name),
            "copy": self._await_copy,
            "indexes": lambda: copying.make_rest(sides, self._scripts()),
            "gate": lambda: gate.make_gate(sides, self._on_wait),
            "catch up": lambda: cutover.catch_up(sides, name, self._options.max_pause_s, self._on_lag),
            "stop": lambda: self._stop_writes(None),
            "cutover": lambda: self._stop_writes(name),
            "activate": self._activate,
            "place": self._place,
            "clean": self._clean,
        }
        actions[step]()

    def _await_copy(self) -> None:
        copying.await_rows(self.sides, self.name, self._on_event)
        cutover.await_one_moment(self.sides, self.name, self._on_lag)

    def _stop_writes(self, slot: str | None) -> None:
        self._stopped_since = cutover.stop_writes(self.sides, slot, self._options.max_pause_s, self._on_wait)

    def _activate(self) -> None:
        if self._options.verify:
            self._comparison = self._kept.enter_context(Comparison(self.sides))
        cutover.activate_target(self.sides)

    def _place(self) -> None:
        self._journal.switch_placement()
        if self._stopped_since is not None:
            self._pause_ms = (time.monotonic() - self._stopped_since) * 1000

    def _clean(self) -> None:
        copying.unsubscribe(self.sides, self.name)
        copying.unpublish(self.sides, self.name)

    def _recover(self, step: Step, error: BaseException) -> None:
        """Lets the source take writes again, if a step failed while it took none."""
        if step not in _WRITES_STOPPED[self._move.offline]:
            return
        try:
            if self._journal.is_placed():
                return
            if self._move.offline:
                self.undo()
            else:
                cutover.take_back(self.sides)
                self._journal.begin_step("catch up")
        except ShardidsError as second:
            raise MoveFailed(
                f"shard {self._move.shard} takes no writes: step {step!r} of its move failed ({error}),"
                f" and so did taking it back ({second.message})",
                hint="When the nodes answer again: --resume or --abort.",
            ) from error

    def _scripts(self) -> Scripts:
        if self._schema is None or time.monotonic() - self._schema[0] > _SCHEMA_FRESH_S:
            self._schema = (time.monotonic(), checks.schema_of_source(self.sides))
        return self._schema[1]

    def _on_lag(self, lag_bytes: int) -> None:
        self._on_event(Lagging(shard=self._move.shard, lag_bytes=lag_bytes))

    def _on_wait(self, attempt: int, reason: str) -> None:
        self._on_event(Waiting(shard=self._move.shard, attempt=attempt, reason=reason))

    def _result(
        self,
        outcome: Outcome,
        *,
        rows_verified: int | None = None,
        left_behind: str | None = None,
        stale_views: tuple[str, ...] = (),
    ) -> Result:
        return Result(
            shard=self._move.shard,
            source=self._move.source,
            target=self._move.target,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._pause_ms,
            rows_verified=rows_verified,
            left_behind=left_behind,
            stale_views=stale_views,
        )


def name_of(catalog: Catalog, move: Move) -> str:
    """What publication, subscription, slot and sessions of a move are named, on servers of many clusters."""
    return f"shardids_move_{catalog.describe().cluster.hex[:8]}_{move.id}_{move.shard}"
