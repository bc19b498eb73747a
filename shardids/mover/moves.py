"""Moves, one or several: planned, run, resumed and aborted.

The journal records each step of a move before it is taken, and every step can be repeated. The effect of
:func:`resume` and :func:`abort` follows from the journal and from the real state of the nodes. Until the
placement is switched the source owns the shard, and the move can be undone; from then on the target owns it,
and only cleaning is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self, TypeVar
from uuid import UUID

from sqlalchemy import text

from shardids.catalog.leases import OnBusy
from shardids.catalog.moves import PLACE, Outcome, all_moves
from shardids.catalog.pins import refuse_pinned
from shardids.catalog.regions import require_region
from shardids.catalog.rows import Catalog, unknown_node
from shardids.errors import (
    ClusterConflict,
    ConnectionFailed,
    MoveFailed,
    MoveRefused,
    ShardidsError,
)
from shardids.migrate.recording import record_moved
from shardids.mover import requirements
from shardids.mover.cutover import ReferencesOfTarget
from shardids.mover.journal import Journal, Result
from shardids.mover.requirements import examine_contents, rows_can_be_compared
from shardids.mover.steps import DEFAULTS, LIVE, OFFLINE, Actions, Options
from shardids.pg.connections import server_major
from shardids.replication.programs import (
    Programs,
    Scripts,
    find_programs,
    lock_patience_ms,
    naming_holders,
    schema_of_source,
)
from shardids.replication.sides import Directory, Sides, refuse_other_copy
from shardids.replication.steps import ABORT, OnEvent, Report, Runner, Step, ignore
from shardids.replication.subscriptions import Refusal, refused
from shardids.tables.views import follow
from shardids.traces import span

T = TypeVar("T")


class Mover:
    """One move and the means to take its steps. :meth:`opened` makes it."""

    def __init__(
        self,
        *,
        journal: Journal,
        sides: Sides,
        name: str,
        actions: Actions,
        report: Report,
        refresh_views: Callable[[], tuple[str, ...]],
    ) -> None:
        self._move = journal.move
        self._steps = OFFLINE if journal.move.offline else LIVE
        self._journal = journal
        self._sides = sides
        self._name = name
        self._actions = actions
        self._report = report
        self._runner = Runner(actions, report, journal, self._stuck, self._reopen)
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
        epoch: UUID | None,
    ) -> Iterator[Self]:
        """Yield a mover for the journal's move.

        ``scripts`` is the shard's schema, if it was just read; ``epoch`` that of the leases, ``None`` for one
        that only looks.
        """
        move = journal.move
        name = move.session_name(directory.cluster)
        fenced = f'fenced on node "{move.source}"'
        report = Report(
            "mover",
            f"shard {move.shard}",
            {"move": move.id, "shard": move.shard, "node": move.source, "target": move.target},
            on_event,
            step=move.step,
            shard=move.shard,
            milestones={"cutover": fenced, "stop": fenced, PLACE: f'placed on node "{move.target}"'},
            ways=f"Go on: shardids shard move {move.shard} --resume;"
            f" undo: shardids shard move {move.shard} --abort",
        )
        with ExitStack() as kept:
            begins = f'move from node "{move.source}" to "{move.target}" at step {move.step}'
            kept.enter_context(report.watching(begins))
            sides = kept.enter_context(
                directory.sides(move.shard, move.source, move.target, name=name, epoch=epoch)
            )
            following = ReferencesOfTarget.opened(catalog, directory, move.target, name=name)
            actions = Actions(
                journal=journal,
                sides=sides,
                references=kept.enter_context(following),
                name=name,
                options=options,
                on_event=report,
                kept=kept,
                scripts=scripts,
            )
            yield cls(
                journal=journal,
                sides=sides,
                name=name,
                actions=actions,
                report=report,
                refresh_views=lambda: _followed(catalog, sides),
            )

    def end_former_sessions(self, *, dry_run: bool = False) -> None:
        """End sessions that a killed mover may have left running, those of its pg_dump and psql included.

        A dry run only connects.
        """
        self._sides.source.end_sessions(self._name, dry_run=dry_run)
        with suppress(ConnectionFailed):  # Steps that need the target will report it.
            self._sides.target.end_sessions(self._name, dry_run=dry_run)

    def refuse_promoted_target(self) -> None:
        """Refuse a target whose standby was promoted after the copy was begun.

        Raises:
            MoveRefused: a standby was promoted.
        """
        refuse_other_copy(self._sides, is_begun=self._journal.step != self._steps[0].name)

    def run(self) -> Result:
        """Take the steps from the one that the journal is at to the last."""
        with self._span("shardids.move"):
            self._runner.take(self._steps)
            stale_views = self._refresh_views()
            self._journal.end("moved")
        return self._result("moved", stale_views=stale_views)

    def _span(self, name: str) -> AbstractContextManager[object]:
        move = self._move
        return span(name, shard=move.shard, source=move.source, target=move.target)

    def undo(self) -> Result:
        """Make the source the shard's only owner, and remove the objects that the move has created.

        A target that does not answer is left as it is: it was never activated before the switch.
        """
        with self._span("shardids.move.abort"):
            self._runner.abort(self._steps)
            self._journal.end("aborted")
        return self._result("aborted")

    def _reopen(self, step: Step[Actions]) -> None:
        """Let the source take writes again after a step that had stopped them failed."""
        self._actions.end_activation()
        self._actions.reopen_source()
        # If the catalog is out of reach, the journal stays at this step.
        with suppress(ConnectionFailed):
            if self._move.offline:
                self.undo()
            else:
                self._journal.begin_step(str(step.back_to))

    def _stuck(self, step: str, error: BaseException, second: ShardidsError) -> MoveFailed:
        return MoveFailed(
            f"shard {self._move.shard} takes no writes: step {step!r} of its move failed ({error}),"
            f" and so did making the source take writes again ({second.message})",
            hint="When the nodes answer again: --resume or --abort.",
        )

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
        self._report.ended(outcome, seconds=result.seconds, pause_ms=result.pause_ms, outcome=outcome)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """The tables and rows of a move, and its way, if nothing stands in it.

    ``size_bytes`` is the size of tables and indexes, ``rows`` PostgreSQL's estimate, ``None`` if a table was
    never analyzed. ``notes`` lists unchecked things, and those that stay behind.
    """

    shard: int
    source: str
    target: str
    offline: bool
    tables: int
    rows: int | None
    size_bytes: int
    sequences: tuple[str, ...]
    pg_dump: str
    notes: tuple[str, ...]
    scripts: Scripts


def plan_move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = DEFAULTS,
    back: bool = False,
    parallel: int = 1,
) -> MovePlan:
    """Find out whether a shard can be moved; change nothing. Takes the arguments of :func:`move`.

    ``parallel`` is how many moves will run at once.

    Raises:
        ClusterConflict: the node is unknown, of another region than the shard, or owns it already; or a move
            of the shard is not over, or it is pinned.
        MoveRefused: any other reason.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        directory = Directory.read(catalog)
        _refuse_pinned(catalog, shard, target)
        if options.on_busy is OnBusy.SKIP:
            journal.refuse_leased(directory, _both(directory, shard, target))
        return _examine(directory, shard, target, options=options, back=back, parallel=parallel)


def _both(directory: Directory, shard: int, target: str) -> tuple[str, str]:
    """Return the owner of a shard and the node that it is moved to.

    Raises:
        ClusterConflict, UnknownShard, ShardLost: the shard can't be moved there.
    """
    source = directory.placement.locate(shard).name
    if target not in directory.placement.nodes:
        raise unknown_node(target, directory.placement.nodes)
    if source == target:
        raise ClusterConflict(f'shard {shard} is on node "{target}" already')
    return source, target


def _refuse_pinned(catalog: Catalog, shard: int, target: str) -> None:
    """Refuse before the lease is taken and the shard examined; the journal's entry looks again."""
    with catalog.engine.connect() as connection:
        refuse_pinned(connection, shard, target)


def move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = DEFAULTS,
    back: bool = False,
    on_event: OnEvent = ignore,
) -> Result:
    """Move a shard to another node.

    With ``back``, an old copy that was left on the target is replaced.

    Raises:
        ClusterConflict, MoveRefused: see :func:`plan_move`; nothing was touched. Also MoveRefused if a
            standby of the target was promoted meanwhile: see :func:`resume`.
        ShardBusy: another command has the shard's lease: see ``options.on_busy``; nothing was touched.
        MoveFailed: the move stopped before its end. It left the source writable if it could.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        directory = Directory.read(catalog)
        nodes = _both(directory, shard, target)
        _refuse_pinned(catalog, shard, target)
        with journal.leased(directory, nodes, on_busy=options.on_busy, on_event=on_event):
            # While it waited for the lease, a move may have ended.
            directory = Directory.read(catalog)
            if _both(directory, shard, target) != nodes:
                raise ClusterConflict(
                    f'shard {shard} was moved meanwhile, to node "{directory.placement.locate(shard).name}"',
                    hint="Run the command again if it is to move on.",
                )
            plan = _examine(directory, shard, target, options=options, back=back)
            journal.enter(
                target,
                offline=options.offline,
                automatic=options.automatic,
                size_bytes=plan.size_bytes,
            )
            with Mover.opened(
                catalog,
                directory,
                journal,
                options=options,
                on_event=on_event,
                scripts=plan.scripts,
                epoch=journal.leases.epoch,
            ) as mover:
                return mover.run()


def resume(
    catalog: Catalog,
    shard: int,
    *,
    options: Options = DEFAULTS,
    on_event: OnEvent = ignore,
) -> Result:
    """Resume an interrupted move from the step that it was at.

    Raises:
        MoveRefused: the target's server is a standby that was promoted meanwhile.
        ShardLost: the shard was lost with its node.
        ClusterConflict, MoveFailed: see :func:`move`.
    """
    with (
        Journal.opened(catalog, shard, takes_over=True) as journal,
        _taken_over(catalog, journal, options, on_event) as mover,
    ):
        if journal.step == ABORT:
            return mover.undo()
        if not journal.is_placed():
            mover.refuse_promoted_target()
        return mover.run()


def abort(catalog: Catalog, shard: int, *, options: Options = DEFAULTS, on_event: OnEvent = ignore) -> Result:
    """Undo an interrupted move, or complete it if it has switched the placement already.

    Raises:
        ClusterConflict: no move is open, or its mover is alive.
        ShardLost: the shard was lost with its node.
    """
    with (
        Journal.opened(catalog, shard, takes_over=True) as journal,
        _taken_over(catalog, journal, options, on_event) as mover,
    ):
        return mover.run() if journal.is_placed() else mover.undo()


@contextmanager
def _taken_over(catalog: Catalog, journal: Journal, options: Options, on_event: OnEvent) -> Iterator[Mover]:
    """Yield a mover that goes on where another stopped; the leases are taken over."""
    # First: a shard that was lost is named as such.
    directory = _directory(catalog, journal.shard)
    move = journal.move
    with (
        journal.leased(
            directory,
            (move.source, move.target),
            on_busy=options.on_busy,
            on_event=on_event,
            former=move.session_name(directory.cluster),
        ),
        Mover.opened(
            catalog, directory, journal, options=options, on_event=on_event, epoch=journal.leases.epoch
        ) as mover,
    ):
        # Again: those that the former process opened before it lost the lease.
        mover.end_former_sessions()
        yield mover


def check_open(catalog: Catalog, shard: int, *, aborts: bool = False) -> None:
    """Find out whether an interrupted move can be resumed, or with ``aborts`` undone; change nothing.

    Raises:
        ClusterConflict, MoveRefused, ShardLost: it can't; see :func:`resume` and :func:`abort`.
    """
    with Journal.opened(catalog, shard) as journal:
        directory = _directory(catalog, shard)
        with Mover.opened(
            catalog, directory, journal, options=DEFAULTS, on_event=ignore, epoch=None
        ) as mover:
            mover.end_former_sessions(dry_run=True)
            if not (aborts or journal.step == ABORT or journal.is_placed()):
                mover.refuse_promoted_target()


def _followed(catalog: Catalog, sides: Sides) -> tuple[str, ...]:
    """Record the schema as the target writes it, and let the query node follow; returns its warnings."""
    record_moved(catalog, sides.shard, sides.source.engine, sides.target.engine)
    return follow(catalog)


def _directory(catalog: Catalog, shard: int) -> Directory:
    """Read the directory for a move that was interrupted.

    Raises:
        ShardLost: the shard on the source or the target is not in the state that the move left there.
    """
    directory = Directory.read(catalog)
    if shard in directory.placement.lost:
        directory.placement.locate(shard)
    return directory


def former_node(catalog: Catalog, shard: int) -> str:
    """Return the node that a shard was last moved away from.

    Raises:
        ClusterConflict: the shard was never moved.
    """
    now = catalog.node_of(shard).name
    for past in reversed(all_moves(catalog)):
        if past.shard == shard and past.outcome == "moved" and past.target == now:
            return past.source
    raise ClusterConflict(f"shard {shard} was never moved", hint="Name a node: --to NODE")


def each(shards: Sequence[int], work: Callable[[int], T], jobs: int = 1) -> list[T]:
    """Call ``work`` with each shard, ``jobs`` at once; begin no more after a failure.

    Raises:
        ShardidsError: the first failure, once the calls that had begun have ended.
    """
    if jobs == 1 or len(shards) == 1:
        # Runs in this thread, so that an interrupt reaches the move, which lets the source take writes again.
        return [work(shard) for shard in shards]
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, shard) for shard in shards]
        try:
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _examine(
    directory: Directory,
    shard: int,
    target: str,
    *,
    options: Options,
    back: bool,
    parallel: int = 1,
) -> MovePlan:
    """Check for everything that stands in the way of a move; returns the plan if nothing does."""
    source, _ = _both(directory, shard, target)
    require_region(directory.placement, shard, target)
    with (
        directory.sides(
            shard, source, target, name="shardids_move_check", lock_timeout_ms=lock_patience_ms()
        ) as sides,
        naming_holders(sides),
        ThreadPoolExecutor(2) as pool,
    ):
        # pg_dump takes as long as the other checks together.
        read = pool.submit(_read_schema, sides)
        contents = pool.submit(examine_contents, sides, offline=options.offline)
        notes: list[str] = []
        offline = options.offline
        refusals = requirements.examine(
            sides, notes, offline=offline, replace_copy=back, parallel=parallel, trusted=options.trusted
        )
        refusals += rows_can_be_compared(sides) if options.verify else []
        _raise(sides, refusals + contents.result())
        with sides.source.autocommit() as connection:
            facts = connection.execute(_FACTS, {"shard": shard}).one()
            sequences = connection.scalars(
                text("select name from shardids.sequences_of(:shard)"), {"shard": shard}
            )
            programs, scripts = read.result()
            plan = MovePlan(
                shard=shard,
                source=source,
                target=target,
                offline=offline,
                tables=facts.tables,
                rows=facts.rows,
                size_bytes=facts.size_bytes,
                sequences=tuple(sequences),
                pg_dump=str(programs.folder / "pg_dump"),
                notes=tuple(notes),
                scripts=scripts,
            )
        _raise(sides, requirements.target_takes_schema(sides, plan.scripts, subscribing=not offline))
    return plan


def _read_schema(sides: Sides) -> tuple[Programs, Scripts]:
    with sides.source.autocommit() as source:
        programs = find_programs(server_major(source))
    return programs, schema_of_source(sides)


def _raise(sides: Sides, refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    source, target = sides.source.name, sides.target.name
    raise refused(
        f'shard {sides.shard} can\'t be moved from node "{source}" to "{target}"', refusals, MoveRefused
    )


_FACTS = text("""
    select count(*) filter (where c.relkind = 'r') as tables,
           case when coalesce(bool_and(c.reltuples >= 0) filter (where c.relkind = 'r'), true)
             then coalesce(sum(c.reltuples) filter (where c.relkind = 'r'), 0)::bigint end as rows,
           coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size_bytes
    from pg_class c where c.oid = any (shardids.tables_of(:shard)) and c.relname <> 'shardids_version'""")
