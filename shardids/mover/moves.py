"""Moves a shard: step by step, each one in the journal before it is taken, each one repeatable.

What :func:`resume` and :func:`abort` do follows from the journal and from what is really there. Until the
placement is switched the shard is the source's, and a move can be undone; from then on it is the target's,
and only cleaning is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Self

from sqlalchemy import text

from shardids.catalog import Catalog, unknown_node
from shardids.errors import ClusterConflict, MoveFailed, ShardidsError
from shardids.mover import checks, copying, cutover
from shardids.mover.checks import Plan
from shardids.mover.dumping import Scripts
from shardids.mover.events import Event, Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.journal import Journal, Move, Outcome, Step, all_moves
from shardids.mover.sides import Sides, end_former_sessions, sides_of
from shardids.mover.verify import Comparison

MAX_PAUSE_S = 2.0
"""How long a shard may take no writes, unless the caller says otherwise."""
_SCHEMA_FRESH_S = 60.0
_WRITES_STOPPED: Mapping[bool, tuple[Step, ...]] = {
    False: ("cutover", "activate", "place"),
    True: ("stop", "copy", "indexes", "activate", "place"),
}
"""Steps during which the source takes no writes, by whether the move is offline."""


def _ignore(_event: Event) -> None:
    pass


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


def plan_move(
    catalog: Catalog, shard: int, target: str, *, offline: bool = False, back: bool = False, parallel: int = 1
) -> Plan:
    """Finds out whether a shard can be moved; changes nothing. Arguments as of :func:`move`.

    Raises:
        ClusterConflict: unknown node, the node it is on, or a move of it is not over.
        MoveRefused: all other reasons.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        return _examine(catalog, shard, target, offline=offline, back=back, parallel=parallel)


def move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = Options(),
    back: bool = False,
    on_event: OnEvent = _ignore,
) -> Result:
    """Moves a shard to another node.

    ``back``: an old copy that was left on the target goes.

    Raises:
        ClusterConflict, MoveRefused: see :func:`plan_move`; nothing was touched.
        MoveFailed: it stopped on its way. Where it could, it left the source writable.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        plan = _examine(catalog, shard, target, offline=options.offline, back=back)
        journal.enter(target, offline=options.offline)
        with _Mover.opened(catalog, journal, options, on_event, plan.scripts) as mover:
            return mover.run()


def resume(
    catalog: Catalog,
    shard: int,
    *,
    options: Options = Options(),
    on_event: OnEvent = _ignore,
) -> Result:
    """Goes on with a move that was broken off, from the step that it was at. Raises as :func:`move` does."""
    with (
        Journal.opened(catalog, shard) as journal,
        _Mover.opened(catalog, journal, options, on_event) as mover,
    ):
        end_former_sessions(mover.sides, mover.name)
        return mover.undo() if journal.step == "abort" else mover.run()


def abort(catalog: Catalog, shard: int, *, on_event: OnEvent = _ignore) -> Result:
    """Undoes a move that was broken off. One that has switched the placement is brought to its end instead.

    Raises:
        ClusterConflict: there is none, or its mover is alive.
    """
    with (
        Journal.opened(catalog, shard) as journal,
        _Mover.opened(catalog, journal, Options(), on_event) as mover,
    ):
        end_former_sessions(mover.sides, mover.name)
        return mover.run() if journal.is_placed() else mover.undo()


def former_node(catalog: Catalog, shard: int) -> str:
    """The node that a shard was moved away from last.

    Raises:
        ClusterConflict: it was never moved.
    """
    now = catalog.node_of(shard).name
    for past in reversed(all_moves(catalog)):
        if past.shard == shard and past.outcome == "moved" and past.target == now:
            return past.source
    raise ClusterConflict(f"shard {shard} was never moved", hint="Name a node: --to NODE")


def _examine(
    catalog: Catalog, shard: int, target: str, *, offline: bool, back: bool, parallel: int = 1
) -> Plan:
    source, names = catalog.node_of(shard).name, catalog.nodes()
    if target not in names:
        raise unknown_node(target, names)
    if source == target:
        raise ClusterConflict(f'shard {shard} is on node "{target}" already')
    sides = sides_of(catalog, shard, source, target, name="shardids_move_check")
    with closing(sides):
        return checks.examine(sides, offline=offline, replace_copy=back, parallel=parallel)


class _Mover:
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
    ) -> None:
        self.sides = sides
        self.name = name
        """Of publication, subscription, slot and sessions."""
        self._move = journal.move
        self._journal = journal
        self._options = options
        self._on_event = on_event
        self._kept = kept
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
                journal=journal, sides=sides, name=name, options=options, on_event=on_event, kept=kept
            )
            if scripts:
                mover._schema = (time.monotonic(), scripts)
            yield mover

    def run(self) -> Result:
        """Takes the steps from the journal's present one on."""
        move, journal = self._move, self._journal
        for step in move.steps[move.steps.index(journal.step) :]:
            if journal.step != step:
                journal.begin_step(step)
            self._on_event(StepBegun(shard=move.shard, step=step))
            try:
                self._take(step)
            except (ShardidsError, KeyboardInterrupt) as error:
                self._recover(step, error)
                raise
            self._on_event(StepDone(shard=move.shard, step=step))
        journal.end("moved")
        rows = self._comparison.rows() if self._comparison else None
        return self._result("moved", rows)

    def undo(self) -> Result:
        """Makes the source the shard's only home, and removes what the move has made."""
        move, sides = self._move, self.sides
        self._journal.begin_step("abort")
        self._on_event(StepBegun(shard=move.shard, step="abort"))
        cutover.take_back(sides)
        cutover.drop_gate(sides.source, move.shard)
        copying.drop_replication(sides, self.name)
        with sides.target.engine.begin() as target:
            if copying.arrived(target, move.shard) is not None:
                target.execute(text("select shardids.drop_copy(:shard)"), {"shard": move.shard})
        self._on_event(StepDone(shard=move.shard, step="abort"))
        self._journal.end("aborted")
        return self._result("aborted", None)

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
            "copy": lambda: copying.await_rows(sides, name, self._on_event),
            "indexes": lambda: copying.make_rest(sides, self._scripts()),
            "gate": lambda: cutover.make_gate(sides, self._on_wait),
            "catch up": lambda: cutover.catch_up(sides, name, self._options.max_pause_s, self._on_lag),
            "stop": lambda: self._stop_writes(None),
            "cutover": lambda: self._stop_writes(name),
            "activate": self._activate,
            "place": self._place,
            "clean": lambda: copying.drop_replication(sides, name),
        }
        actions[step]()

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

    def _result(self, outcome: Outcome, rows: int | None) -> Result:
        return Result(
            shard=self._move.shard,
            source=self._move.source,
            target=self._move.target,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._pause_ms,
            rows_verified=rows,
        )


def name_of(catalog: Catalog, move: Move) -> str:
    """What publication, subscription, slot and sessions of a move are named, on servers of many clusters."""
    return f"shardids_move_{catalog.describe().cluster.hex[:8]}_{move.id}_{move.shard}"
