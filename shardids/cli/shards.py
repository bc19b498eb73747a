"""``shardids shard``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.beside import move_on_citus, shown_workers
from shardids.cli.command import NewTablesOption, OnBusyOption, Run, TrustOption, refuse, takes
from shardids.cli.copies import ShardsArgument, activate_shards, place_shards, print_left, purge_shards
from shardids.cli.nodes import reset_clock
from shardids.cli.pins import pin_shards, shown_pin, unpin_shards
from shardids.cli.printing import bars, err, out, print_json, print_warnings
from shardids.errors import BadArgument, ShardBusy
from shardids.pg.notation import counted, named_shards, parse_duration_ms, parse_shards

if TYPE_CHECKING:
    from rich.progress import TaskID

    from shardids import mover
    from shardids.catalog.rows import Catalog
    from shardids.migrate.migration import MigrateNew
    from shardids.migrate.recording import Accepted


app = typer.Typer(help="The logical shards.", no_args_is_help=True)


@app.command("create")
@takes("catalog", "dry-run")
def create_shards(
    run: Run,
    shards: Annotated[str, typer.Argument(help="Numbers and ranges, 0-31,40, or all.")] = "all",
    node: Annotated[
        str | None, typer.Option(help="Node for those without a place; else they are spread evenly.")
    ] = None,
    migrations: NewTablesOption = None,
) -> None:
    """Create shards on their nodes. Idempotent: creates missing ones."""
    from shardids.migrate.environment import Environment
    from shardids.migrate.migration import migrator_of_new_shards
    from shardids.tables import views

    environment = None if migrations is None else Environment.at(migrations)
    there = run.catalog
    numbers = parse_shards(shards, there.shard_total())
    if run.dry:
        made = there.plan_shards(numbers, node, dry_run=True)
    else:
        with ExitStack() as stack:
            migrate: MigrateNew | None = None
            if environment is not None:
                migrate = stack.enter_context(migrator_of_new_shards(there, environment))
            made = _create_with_progress(there, numbers, node, migrate)
        if made:
            print_warnings(views.follow(there))
    done = "Would make" if run.dry else "Made"
    for name, count in sorted(Counter(made.values()).items()):
        out.print(f'{done} {counted(count, "shard")} on node "{name}"')
    if not made:
        out.print("Nothing to do: the shards exist")


def _create_with_progress(
    there: Catalog, shards: list[int], node: str | None, migrate: MigrateNew | None
) -> dict[int, str]:
    from shardids.migrate.install import provision

    with bars("node {task.description}", "bar", "count", "left", transient=False) as progress:
        tasks = {}

        def plan(counts: dict[str, int]) -> None:
            for name, count in sorted(counts.items()):
                tasks[name] = progress.add_task(name, total=count)

        return provision.create_shards(
            there,
            shards,
            node=node,
            migrate=migrate or (lambda _node, _shards: None),
            on_plan=plan,
            on_progress=lambda name, count: progress.advance(tasks[name], count),
        )


@app.command("list")
@takes("catalog", "json")
def list_shards(
    run: Run,
    shard: Annotated[
        int | None, typer.Argument(metavar="[SHARD]", help="Show this one, from the catalog and its owner.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="Only those on this node.")] = None,
) -> None:
    """Show which node holds which shard, and which command is changing it."""
    from shardids.catalog.leases import of_owners, visible_leases
    from shardids.catalog.nodes import Nodes
    from shardids.catalog.pins import pins
    from shardids.catalog.rows import unknown_node
    from shardids.catalog.topology import schema_name
    from shardids.migrate.install.inspecting import inspect_shard

    there = run.catalog
    if shard is not None:
        refuse("to one shard", node=node)
        (number,) = parse_shards(str(shard), there.shard_total())
        facts = inspect_shard(there, number)
        if run.as_json:
            print_json([facts])
            return
        for name, value in facts.items():
            out.print(f"{name:>16}  {value}")
        return
    placement, prefix = there.placement(), there.describe().schema_prefix
    if node is not None and node not in placement.nodes:
        raise unknown_node(node, placement.nodes)
    with Nodes(placement.nodes, there.url) as nodes:
        found = of_owners(visible_leases(there, nodes), placement.owners())
    leases = {number: f"{lease} ({lease.standing})" for number, lease in found.items()}
    pinned: dict[int, list[str]] = {}
    for one in pins(there):
        pinned.setdefault(one.shard, []).append(shown_pin(one))
    workers = shown_workers(there) if run.is_on_citus else {}
    rows = [
        {
            "shard": number,
            "node": name,
            "region": placement.region_of(number),
            "schema": schema_name(prefix, number),
            "state": "lost" if number in placement.lost else "active",
            "lease": leases.get(number),
            "pin": ", ".join(pinned.get(number, [])) or None,
            **workers.get(number, {}),
        }
        for number, name in sorted(placement.owners().items())
        if node in (None, name)
    ]
    run.print_rows(rows, empty="No shard yet. To make them: shardids shard create")


@app.command("accept-schema")
@takes("catalog", "dry-run", "yes", "json")
def accept_schema(
    run: Run,
    like: Annotated[
        int | None,
        typer.Option(metavar="SHARD", help="The shard whose schema is recorded, if shards differ."),
    ] = None,
) -> None:
    """Record the present schema of the shards as the one that they must have.

    "migrate" and commands that change shards record it themselves. Other changes, made by psql or by plain
    Alembic, are shown, and recorded.
    """
    from shardids.migrate.recording import accept, plan_acceptance

    accepted = plan_acceptance(run.catalog, like)
    rows = [
        {
            "revision": one.key[0],
            "server_version": one.key[1],
            "shards": len(one.shards),
            "compared_with": one.compared_with,
            "objects": len(one.objects),
            "differences": list(one.lines),
        }
        for one in accepted
    ]
    changed = [one for one in accepted if one.lines or not one.is_recorded]
    if run.as_json:
        print_json(rows)
    else:
        for one in changed:
            print_acceptance(one)
    if not changed:
        err.print("Nothing to record: the shards are as is recorded")
        return
    run.ask(f"Record this for {named_shards(sorted(s for one in changed for s in one.shards))}?")
    if not run.dry:
        accept(run.catalog, accepted, "shard accept-schema")
        err.print("Recorded")


def print_acceptance(accepted: Accepted) -> None:
    """Print how the state of shards differs from the recorded one."""
    revision, version = accepted.key
    out.print(f"{named_shards(accepted.shards)} at {revision or 'no revision'} on PostgreSQL {version}:")
    if accepted.compared_with is None:
        out.print(f"  nothing was recorded yet; {len(accepted.objects)} objects and states are there")
    elif not accepted.is_recorded:
        out.print(f"  nothing was recorded yet; since {accepted.compared_with or 'no revision'}:")
    for line in accepted.lines if accepted.compared_with is not None else ():
        out.print(f"  {line}", markup=False)


MaxPauseOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="How long a shard may take no writes: 500ms, 2s.", show_default="2s"),
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Compare all rows afterwards.")]


@app.command("move")
@takes("catalog", "dry-run", "json")
def move_shards(
    run: Run,
    shards: ShardsArgument = None,
    to: Annotated[str | None, typer.Option(help="The node to move them to.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Move them to where they came from.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume moves that were interrupted.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Undo moves that were interrupted.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the moves of shards, those under way among them.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many at once.")] = 1,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="For shards that can't be moved live: by pg_dump, with writes stopped all the while.",
        ),
    ] = False,
    verify: VerifyOption = False,
    max_pause: MaxPauseOption = None,
    trust: TrustOption = None,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Move shards to another node while they are written to.

    The old copy stays on its node, fenced, until "shard purge".
    """
    from shardids import mover
    from shardids.catalog.leases import OnBusy

    if [to is not None, back, resume, abort, listed].count(True) != 1:
        raise BadArgument("say what to do: one of --to NODE, --back, --resume, --abort and --list")
    if abort or listed:
        refuse(
            "to --abort" if abort else "to --list",
            offline=offline,
            verify=verify,
            max_pause=max_pause,
            trust=trust,
            jobs=listed and jobs != 1,
            on_busy=listed and on_busy != "wait",
            dry_run=listed and run.dry,
        )
    if run.is_on_citus:
        own: dict[str, object] = {
            "back": back,
            "resume": resume,
            "abort": abort,
            "list": listed,
            "jobs": jobs != 1,
        }
        own |= {"offline": offline, "verify": verify, "max_pause": max_pause, "trust": trust}
        move_on_citus(run, shards, to, on_busy, own)
        return
    if offline:
        refuse("to --offline, which takes as long as it takes", max_pause=max_pause)
    if resume:
        refuse("to --resume, which goes on as the move began", offline=offline, trust=trust)
    if listed:
        moves = [_row_of(move) for move in mover.all_moves(run.catalog)]
        if shards:
            chosen = _numbers(run.catalog, shards, only_open=False)
            moves = [row for row in moves if row["shard"] in chosen]
        run.print_rows(moves, empty="No shard was ever moved")
        return
    options = options_of(verify, max_pause, trust, on_busy, offline=offline)
    there = run.catalog
    numbers = _numbers(there, shards, only_open=resume or abort)
    if run.dry:
        _print_plans(run, numbers, to, options, jobs=jobs, interrupted=resume or abort, aborts=abort)
        return
    with shown_moves() as show:

        def work(shard: int) -> mover.Result | str:
            try:
                return take(shard)
            except ShardBusy as error:
                if on_busy == "wait" or len(numbers) == 1:
                    raise
                return error.in_a_line()

        def take(shard: int) -> mover.Result:
            if abort:
                return mover.abort(there, shard, options=options, on_event=show)
            if resume:
                return mover.resume(there, shard, options=options, on_event=show)
            target = to or mover.former_node(there, shard)
            return mover.move(there, shard, target, back=back, options=options, on_event=show)

        if not (resume or abort) and len(numbers) > 1:
            # What prevents any of the moves is reported before the first one starts. A lease leaves one out.
            planned = replace(options, on_busy=OnBusy.WAIT)
            for shard in numbers:
                target = to or mover.former_node(there, shard)
                mover.plan_move(there, shard, target, options=planned, back=back, parallel=jobs)
        done = mover.each(numbers, work, jobs)
    print_results(run, [one for one in done if isinstance(one, mover.Result)])
    print_left([one for one in done if isinstance(one, str)])


def _numbers(there: Catalog, shards: Sequence[str] | None, *, only_open: bool) -> list[int]:
    from shardids import mover

    if shards:
        return parse_shards(",".join(shards), there.shard_total())
    if not only_open:
        raise BadArgument("which shards?", hint="For example: shardids shard move 5 --to b")
    return [move.shard for move in mover.open_moves(there)]


def _print_plans(
    run: Run,
    shards: Sequence[int],
    to: str | None,
    options: mover.Options,
    *,
    jobs: int,
    interrupted: bool,
    aborts: bool,
) -> None:
    from shardids import mover

    if interrupted:
        for shard in shards:
            mover.check_open(run.catalog, shard, aborts=aborts)
        rows = [_row_of(move) for move in mover.open_moves(run.catalog, shards)]
        run.print_rows(rows, empty="No move was interrupted")
        return
    plans = [
        mover.plan_move(
            run.catalog,
            shard,
            to or mover.former_node(run.catalog, shard),
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
            "rows": "?" if plan.rows is None and not run.as_json else plan.rows,
            "size_bytes": plan.size_bytes,
            "sequences": len(plan.sequences),
        }
        for plan in plans
    ]
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        err.print(f"Note: {note}")
    run.print_rows(rows)
    if not run.as_json:
        out.print("No obstacles found; nothing was changed")


def print_results(run: Run, done: Sequence[mover.Result]) -> None:
    """Print how moves ended."""
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
    run.print_rows(rows, empty="Nothing to do")


def _row_of(move: mover.Move) -> dict[str, object]:
    return {
        "shard": move.shard,
        "from": move.source,
        "to": move.target,
        "how": "offline" if move.offline else "live",
        "started": move.started_at,
        "step": move.step,
        "outcome": move.outcome or "open",
    }


def options_of(
    verify: bool,
    max_pause: str | None,
    trust: Sequence[str] | None,
    on_busy: str,
    *,
    offline: bool = False,
) -> mover.Options:
    """Return how shards are moved, as the options of a command say."""
    from shardids import mover
    from shardids.catalog.leases import OnBusy

    return mover.Options(
        offline=offline,
        verify=verify,
        max_pause_s=_pause_s(max_pause),
        trusted=tuple(trust or ()),
        on_busy=OnBusy(on_busy),
    )


def _pause_s(text: str | None) -> float:
    from shardids import mover

    if text is None:
        return mover.MAX_PAUSE_S
    milliseconds = parse_duration_ms(text)
    if not 50 <= milliseconds <= 600_000:
        raise BadArgument(f"{text!r} is not between 50ms and 10min", hint="For example: 500ms or 2s")
    return milliseconds / 1000


@contextmanager
def shown_moves() -> Iterator[mover.OnEvent]:
    """Show moves in progress: by a bar of steps for each on a terminal, otherwise by a line for each step."""
    from shardids import mover

    with bars("shard {task.fields[shard]}", "bar", "{task.description}") as progress:
        tasks: dict[int | None, TaskID] = {}
        steps: dict[int | None, mover.StepBegun] = {}

        def show(event: mover.Event) -> None:
            line, part = _told(event)
            if not err.is_terminal:
                if isinstance(event, mover.StepBegun | mover.Waiting):
                    err.print(f"shard {event.shard}: {line}")
                return
            if event.shard not in tasks:
                tasks[event.shard] = progress.add_task("", total=None, shard=event.shard)
            if isinstance(event, mover.StepBegun):
                steps[event.shard] = event
            step = steps.get(event.shard)
            if step is None or not step.total:
                progress.update(tasks[event.shard], description=line)
                return
            progress.update(
                tasks[event.shard],
                description=f"step {step.number} of {step.total} · {line}",
                total=step.total,
                completed=step.number - 1 + part,
            )

        yield show


def _told(event: mover.Event) -> tuple[str, float]:
    """Return a text for an event, and the part of its step that is done."""
    from rich.filesize import decimal

    from shardids import mover

    match event:
        case mover.StepBegun():
            return event.step, 0
        case mover.StepDone():
            return event.step, 1
        case mover.Copying():
            left = "" if event.seconds_left is None else f" · {event.seconds_left:,.0f} s left"
            rows = f"{event.rows_done:,} of {event.rows_total:,} rows"
            size = f"{decimal(event.bytes_done)} of {decimal(event.bytes_total)}"
            # The totals are estimates, and 0 for tables that were never analyzed.
            done = min(event.bytes_done / event.bytes_total, 1) if event.bytes_total else 0
            return f"copy · {size} · {rows}{left}", done
        case mover.Lagging():
            return f"catch up · {decimal(event.lag_bytes)} behind", 0
        case mover.Waiting():
            return f"put off ({event.attempt}): {event.reason}", 0
        case _:
            return type(event).__name__, 0


app.command("pin")(pin_shards)
app.command("unpin")(unpin_shards)
app.command("reset-clock")(reset_clock)
app.command("activate")(activate_shards)
app.command("place")(place_shards)
app.command("purge")(purge_shards)
