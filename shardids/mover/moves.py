"""Plans, runs, resumes and aborts moves, one or several.

The journal records each step of a move before it is taken, and every step can be repeated. What
:func:`resume` and :func:`abort` do follows from the journal and from what the nodes really have. Until the
placement is switched the source owns the shard, and the move can be undone; from then on the target owns it,
and only cleaning is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import text

from shardids.catalog.notation import named_shards
from shardids.catalog.regions import require_region
from shardids.catalog.rows import Catalog, unknown_node
from shardids.errors import ClusterConflict, MoveRefused
from shardids.mover import homes, requirements
from shardids.mover.balance import Transfer
from shardids.mover.contents import examine_contents, rows_can_be_compared
from shardids.mover.events import Event, OnEvent, Result
from shardids.mover.history import ABORT, LOSS, all_moves, open_moves
from shardids.mover.journal import Journal
from shardids.mover.mover import Mover
from shardids.mover.options import DEFAULTS, Options
from shardids.mover.programs import Programs, Scripts, find_programs, schema_of_source
from shardids.mover.requirements import Refusal
from shardids.mover.sides import Directory, Sides, server_major


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """What a move would move, and how, if nothing stands in its way.

    ``size_bytes`` is the size of tables and indexes, ``rows`` an estimate. ``notes`` lists what could not be
    checked, and what stays behind.
    """

    shard: int
    source: str
    target: str
    offline: bool
    tables: int
    rows: int
    size_bytes: int
    sequences: tuple[str, ...]
    pg_dump: str
    notes: tuple[str, ...]
    scripts: Scripts


def _ignore(_event: Event) -> None:
    pass


def plan_move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = DEFAULTS,
    back: bool = False,
    parallel: int = 1,
) -> MovePlan:
    """Finds out whether a shard can be moved; changes nothing. Takes the arguments of :func:`move`.

    ``parallel`` is how many moves will run at once.

    Raises:
        ClusterConflict: the node is unknown, of another region than the shard, or owns it already; or a move
            of the shard is not over.
        MoveRefused: any other reason.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        return _examine(Directory.read(catalog), shard, target, options=options, back=back, parallel=parallel)


def move(
    catalog: Catalog,
    shard: int,
    target: str,
    *,
    options: Options = DEFAULTS,
    back: bool = False,
    on_event: OnEvent = _ignore,
) -> Result:
    """Moves a shard to another node.

    With ``back``, an old copy that was left on the target is replaced.

    Raises:
        ClusterConflict, MoveRefused: see :func:`plan_move`; nothing was touched. Also MoveRefused if a
            standby of the target was promoted meanwhile: see :func:`resume`.
        MoveFailed: the move stopped before its end. It left the source writable if it could.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        directory = Directory.read(catalog)
        plan = _examine(directory, shard, target, options=options, back=back)
        journal.enter(target, offline=options.offline)
        with Mover.opened(
            catalog, directory, journal, options=options, on_event=on_event, scripts=plan.scripts
        ) as mover:
            return mover.run()


def resume(
    catalog: Catalog,
    shard: int,
    *,
    options: Options = DEFAULTS,
    on_event: OnEvent = _ignore,
) -> Result:
    """Resumes an interrupted move from the step that it was at.

    Raises:
        MoveRefused: the target's server is a standby that was promoted meanwhile.
        ShardLost: the shard was lost with its node.
        ClusterConflict, MoveFailed: see :func:`move`.
    """
    with Journal.opened(catalog, shard) as journal:
        if journal.step == LOSS:
            return homes.resume(catalog, journal)
        directory = _directory(catalog, shard)
        with Mover.opened(catalog, directory, journal, options=options, on_event=on_event) as mover:
            mover.end_former_sessions()
            if journal.step == ABORT:
                return mover.undo()
            if not journal.is_placed():
                mover.refuse_promoted_target()
            return mover.run()


def abort(catalog: Catalog, shard: int, *, on_event: OnEvent = _ignore) -> Result:
    """Undoes an interrupted move, or completes it if it has switched the placement already.

    Raises:
        ClusterConflict: no move is open, or its mover is alive.
        ShardLost: the shard was lost with its node.
    """
    with Journal.opened(catalog, shard) as journal:
        if journal.step == LOSS:
            return homes.resume(catalog, journal)
        directory = _directory(catalog, shard)
        with Mover.opened(catalog, directory, journal, options=DEFAULTS, on_event=on_event) as mover:
            mover.end_former_sessions()
            return mover.run() if journal.is_placed() else mover.undo()


def _directory(catalog: Catalog, shard: int) -> Directory:
    """Reads the directory for a move that was interrupted.

    Raises:
        ShardLost: what the source or the target has of the shard now is not what the move left there.
    """
    directory = Directory.read(catalog)
    if shard in directory.placement.lost:
        directory.placement.locate(shard)
    return directory


def former_node(catalog: Catalog, shard: int) -> str:
    """Returns the node that a shard was last moved away from.

    Raises:
        ClusterConflict: the shard was never moved.
    """
    now = catalog.node_of(shard).name
    for past in reversed(all_moves(catalog)):
        if past.shard == shard and past.outcome == "moved" and past.target == now:
            return past.source
    raise ClusterConflict(f"shard {shard} was never moved", hint="Name a node: --to NODE")


def each(shards: Sequence[int], work: Callable[[int], Result], jobs: int = 1) -> list[Result]:
    """Calls ``work`` with each shard, ``jobs`` at once; begins no more after a failure.

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


def require_none_open(catalog: Catalog) -> None:
    """Refuses to plan moves while others are open.

    Raises:
        ClusterConflict: a move is not over.
    """
    if shards := [move.shard for move in open_moves(catalog)]:
        raise ClusterConflict(
            f"{named_shards(shards)}: a move is not over",
            hint="To resume it first: --resume. To undo one: shardids shard move SHARD --abort",
        )


def resume_open(catalog: Catalog, options: Options, on_event: OnEvent) -> list[Result]:
    """Resumes all interrupted moves, one after another."""
    return [
        resume(catalog, interrupted.shard, options=options, on_event=on_event)
        for interrupted in open_moves(catalog)
    ]


def carry_out(
    catalog: Catalog, transfers: Iterable[Transfer], options: Options, on_event: OnEvent
) -> list[Result]:
    """Moves shards one after another, and replaces old copies on their targets.

    A shard that another process has moved to its target meanwhile is passed over.
    """
    return [
        move(catalog, transfer.shard, transfer.target, back=True, options=options, on_event=on_event)
        for transfer in transfers
        if catalog.placement().locate(transfer.shard).name != transfer.target
    ]


def _examine(
    directory: Directory,
    shard: int,
    target: str,
    *,
    options: Options,
    back: bool,
    parallel: int = 1,
) -> MovePlan:
    """Checks for everything that stands in the way of a move; returns the plan if nothing does."""
    source = directory.placement.locate(shard).name
    if target not in directory.placement.nodes:
        raise unknown_node(target, directory.placement.nodes)
    if source == target:
        raise ClusterConflict(f'shard {shard} is on node "{target}" already')
    require_region(directory.placement, shard, target)
    with (
        directory.sides(shard, source, target, name="shardids_move_check") as sides,
        ThreadPoolExecutor(1) as pool,
    ):
        # pg_dump takes as long as the other checks together.
        read = pool.submit(_read_schema, sides)
        notes: list[str] = []
        offline = options.offline
        refusals = requirements.examine(
            sides, notes, offline=offline, replace_copy=back, parallel=parallel, trusted=options.trusted
        )
        refusals += rows_can_be_compared(sides) if options.verify else []
        _raise(sides, refusals + examine_contents(sides, offline=offline))
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
    where = f'shard {sides.shard} can\'t be moved from node "{source}" to "{target}"'
    if len(refusals) == 1:
        raise MoveRefused(f"{where}: {refusals[0].reason}", hint=refusals[0].remedy)
    raise MoveRefused(
        f"{where}:\n" + "\n".join(f"- {refusal.reason}" for refusal in refusals),
        hint="\n".join(f"- {remedy}" for remedy in dict.fromkeys(refusal.remedy for refusal in refusals)),
    )


_FACTS = text("""
    select count(*) filter (where c.relkind = 'r') as tables,
           coalesce(sum(c.reltuples) filter (where c.reltuples > 0 and c.relkind = 'r'), 0)::bigint as rows,
           coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size_bytes
    from pg_class c where c.oid = any (shardids.tables_of(:shard))""")
