"""``shardids shard move``, ``purge`` and ``moves``, ``rebalance`` and ``node drain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shardids import mover, views
from shardids.catalog.notation import named_shards, parse_duration_ms, parse_shards
from shardids.catalog.references import references_of
from shardids.catalog.rows import Catalog
from shardids.cli.common import (
    CatalogOption,
    DryRunOption,
    JsonOption,
    TrustOption,
    YesOption,
    confirm,
    opened,
    print_json,
)
from shardids.cli.output import err, out, print_rows, print_warnings
from shardids.errors import BadArgument

ShardsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SHARD", help="Numbers and ranges, 0-31,40, or all.")
]
MaxPauseOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long a shard may take no writes: 500ms, 2s.")
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Compare all rows afterwards.")]
ByOption = Annotated[mover.By, typer.Option("--by", help="What to make even over the nodes.")]
MarginOption = Annotated[
    float, typer.Option(min=0, help="How far a node may be from the mean, as a part of it.")
]


def move_shards(
    catalog: CatalogOption,
    shards: ShardsArgument = None,
    to: Annotated[str | None, typer.Option(help="The node to move them to.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Move them to where they came from.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume moves that were interrupted.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Undo moves that were interrupted.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many at once.")] = 1,
    offline: Annotated[
        bool, typer.Option("--offline", help="By pg_dump, with writes stopped all the while.")
    ] = False,
    verify: VerifyOption = False,
    max_pause: MaxPauseOption = "2s",
    trust: TrustOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move shards to another node while they are written to.

    The old copy stays on its node, fenced, until "shard purge".
    """
    if [to is not None, back, resume, abort].count(True) != 1:
        raise BadArgument("say what to do: one of --to NODE, --back, --resume and --abort")
    options = _options(verify, max_pause, trust, offline=offline)
    with opened(catalog) as there:
        numbers = _numbers(there, shards, only_open=resume or abort)
        if dry_run:
            _print_plans(there, numbers, to, options, jobs=jobs, interrupted=resume or abort, as_json=as_json)
            return
        with _shown() as show:

            def work(shard: int) -> mover.Result:
                if abort:
                    return mover.abort(there, shard, on_event=show)
                if resume:
                    return mover.resume(there, shard, options=options, on_event=show)
                target = to or mover.former_node(there, shard)
                return mover.move(there, shard, target, back=back, options=options, on_event=show)

            if not (resume or abort) and len(numbers) > 1:
                # What prevents any of the moves is reported before the first one starts.
                for shard in numbers:
                    target = to or mover.former_node(there, shard)
                    mover.plan_move(there, shard, target, options=options, back=back, parallel=jobs)
            done = mover.each(numbers, work, jobs)
    _print_results(done, as_json=as_json)


def _numbers(there: Catalog, shards: Sequence[str] | None, *, only_open: bool) -> list[int]:
    if shards:
        return parse_shards(",".join(shards), there.describe().shard_count)
    if not only_open:
        raise BadArgument("which shards?", hint="For example: shardids shard move 5 --to b")
    return [move.shard for move in mover.open_moves(there)]


def _print_plans(
    there: Catalog,
    shards: Sequence[int],
    to: str | None,
    options: mover.Options,
    *,
    jobs: int,
    interrupted: bool,
    as_json: bool,
) -> None:
    if interrupted:
        rows = [_row_of(move) for move in mover.open_moves(there, shards)]
        print_rows(rows, as_json=as_json, empty="No move was interrupted")
        return
    plans = [
        mover.plan_move(
            there,
            shard,
            to or mover.former_node(there, shard),
            options=options,
            back=to is None,
            parallel=jobs,
        )
        for shard in shards
    ]
    rows = [
        {
            "shard": plan.shard,
            "from": plan.source,
            "to": plan.target,
            "tables": plan.tables,
            "rows": plan.rows,
            "bytes": plan.size_bytes,
            "sequences": len(plan.sequences),
        }
        for plan in plans
    ]
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        err.print(f"Note: {note}", markup=False)
    print_rows(rows, as_json=as_json, empty="")
    if not as_json:
        out.print("No obstacles found; nothing was changed")


def _print_results(done: Sequence[mover.Result], *, as_json: bool) -> None:
    rows = [
        {
            "shard": one.shard,
            "from": one.source,
            "to": one.target,
            "outcome": one.outcome,
            "seconds": round(one.seconds, 1),
            "pause_ms": None if one.pause_ms is None else round(one.pause_ms),
            "rows_verified": one.rows_verified,
        }
        for one in done
    ]
    for one in done:
        if one.left_behind:
            err.print(
                f"shard {one.shard}: node {one.left_behind!r} did not answer; its part of the copy stays"
            )
        print_warnings(one.stale_views)
    print_rows(rows, as_json=as_json, empty="Nothing to do")


def list_moves(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the moves of shards, those under way among them."""
    with opened(catalog) as there:
        rows = [_row_of(move) for move in mover.all_moves(there)]
    print_rows(rows, as_json=as_json, empty="No shard was ever moved")


def _row_of(move: mover.Move) -> dict[str, object]:
    return {
        "shard": move.shard,
        "from": move.source,
        "to": move.target,
        "how": "offline" if move.offline else "live",
        "started": move.started_at.isoformat(timespec="seconds"),
        "step": move.step,
        "outcome": move.outcome or "open",
    }


def purge_shards(
    catalog: CatalogOption,
    shards: ShardsArgument = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Drop the old copies of these shards."""
    with opened(catalog) as there:
        if not shards:
            raise BadArgument("which shards?", hint="For example: shardids shard purge 5, or all")
        numbers = parse_shards(",".join(shards), there.describe().shard_count)
        copies = mover.purge(there, numbers, dry_run=True)
        if copies and not dry_run:
            named = named_shards({copy.shard for copy in copies})
            confirm(f"Drop the old copies of {named}, with all their rows?", yes=yes)
            # A view that still reads an old copy would fail once the copy is dropped.
            print_warnings(views.follow(there))
            copies = mover.purge(there, numbers)
    print_rows([asdict(copy) for copy in copies], as_json=as_json, empty="No old copy is left")


def rebalance(
    catalog: CatalogOption,
    by: ByOption = mover.By.SIZE,
    plan: Annotated[bool, typer.Option("--plan", "--dry-run", help="Print the moves; do none.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node that keeps what it has; repeatable.")
    ] = None,
    margin: MarginOption = mover.MARGIN,
    resume: Annotated[
        bool, typer.Option("--resume", help="First resume moves that were interrupted.")
    ] = False,
    verify: VerifyOption = False,
    max_pause: MaxPauseOption = "2s",
    trust: TrustOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move shards, one after another, until all nodes carry about the same.

    After an interruption, run it again with --resume.
    """
    options = _options(verify, max_pause, trust)
    with opened(catalog) as there:
        run_balance(
            there,
            lambda: mover.plan_balance(there, by, margin=margin, exclude=exclude or ()),
            options,
            only_plan=plan,
            resume=resume,
            as_json=as_json,
        )


def drain_node(
    name: str,
    catalog: CatalogOption,
    by: ByOption = mover.By.SIZE,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node that gets nothing; repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="First resume moves that were interrupted.")
    ] = False,
    verify: VerifyOption = False,
    max_pause: MaxPauseOption = "2s",
    trust: TrustOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move all shards away from a node, so that it can be removed."""
    options = _options(verify, max_pause, trust)
    with opened(catalog) as there:
        if references_of(there).writer == name:
            err.print(
                f'Reference tables are written to on node "{name}", which this does not change.'
                " Before the node is removed: shardids reference move --to NODE",
                markup=False,
            )
        run_balance(
            there,
            lambda: mover.plan_balance(there, by, exclude=exclude or (), drained=name, margin=float("inf")),
            options,
            only_plan=dry_run,
            resume=resume,
            as_json=as_json,
        )


def run_balance(
    there: Catalog,
    find: Callable[[], mover.Balance],
    options: mover.Options,
    *,
    only_plan: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Prints what a plan moves, then moves it."""
    with _shown() as show:
        done = mover.resume_open(there, options, show) if resume and not only_plan else []
    if not only_plan:
        mover.require_none_open(there)
    found = find()
    if as_json and only_plan:
        print_json(asdict(found))
        return
    if not as_json:
        print_rows([asdict(one) for one in found.transfers], as_json=False, empty="Nothing to move")
        for node, before in found.before.items():
            out.print(f'node "{node}": {_amount(before)} before, {_amount(found.after[node])} after')
    if only_plan:
        return
    with _shown() as show:
        done += mover.carry_out(there, found.transfers, options, show)
    if done or as_json:
        _print_results(done, as_json=as_json)


def _options(
    verify: bool, max_pause: str, trust: Sequence[str] | None, *, offline: bool = False
) -> mover.Options:
    return mover.Options(
        offline=offline, verify=verify, max_pause_s=_seconds(max_pause), trusted=tuple(trust or ())
    )


def _amount(load: float) -> str:
    return f"{load:,.0f}"


def _seconds(text: str) -> float:
    milliseconds = parse_duration_ms(text)
    if not 50 <= milliseconds <= 600_000:
        raise BadArgument(f"{text!r} is not between 50ms and 10min", hint="For example: 500ms or 2s")
    return milliseconds / 1000


@contextmanager
def _shown() -> Iterator[mover.OnEvent]:
    """Shows moves in progress: by a bar for each on a terminal, otherwise by a line for each step."""
    columns = (TextColumn("shard {task.fields[shard]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        tasks: dict[int, TaskID] = {}

        def show(event: mover.Event) -> None:
            line, total, completed = _told(event)
            if not err.is_terminal:
                if isinstance(event, mover.StepBegun | mover.Waiting):
                    err.print(f"shard {event.shard}: {line}", markup=False)
                return
            if event.shard not in tasks:
                tasks[event.shard] = progress.add_task("", total=None, shard=event.shard)
            progress.update(tasks[event.shard], description=line, total=total, completed=completed)

        yield show


def _told(event: mover.Event) -> tuple[str, float | None, float]:
    """Returns a text for an event, with the total and the completed part of its bar."""
    match event:
        case mover.StepBegun() | mover.StepDone():
            return event.step, None, 0
        case mover.Copying():
            left = "" if event.seconds_left is None else f" · {event.seconds_left:,.0f} s left"
            rows = f"{event.rows_done:,} of {event.rows_total:,} rows"
            size = f"{decimal(event.bytes_done)} of {decimal(event.bytes_total)}"
            return f"copy · {size} · {rows}{left}", event.bytes_total, event.bytes_done
        case mover.Lagging():
            return f"catch up · {decimal(event.lag_bytes)} behind", None, 0
        case mover.Waiting():
            return f"put off ({event.attempt}): {event.reason}", None, 0
