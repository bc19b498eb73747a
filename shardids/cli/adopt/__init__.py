"""``shardids adopt``: an existing database into shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, TrustOption, refuse, takes
from shardids.cli.migrate import FOLDER, DirOption
from shardids.cli.printing import err, out, print_json
from shardids.errors import BadArgument

if TYPE_CHECKING:
    from shardids.adopt.adopter import Result
    from shardids.adopt.run.sparing import Limits

app = typer.Typer(help="Take an existing PostgreSQL database into shards.", no_args_is_help=True)

BLOCKED = 3
"""The exit code of a plan that can't be run."""


SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        envvar="SHARDIDS_SOURCE",
        metavar="URL",
        help="The source, if it is not reached as the plan says, or needs a password. It is not stored.",
    ),
]
ViaOption = Annotated[
    str | None,
    typer.Option(
        "--via",
        envvar="SHARDIDS_RELAY",
        metavar="RELAY",
        help="The relay's URL: an empty database of PostgreSQL 15 or later between the source and the nodes;"
        " by default as the plan says. Its password is not stored.",
    ),
]
ReaderOption = Annotated[
    str | None,
    typer.Option(
        "--reader-url",
        envvar="SHARDIDS_SOURCE_READER",
        metavar="URL",
        help="The source's URL with a role that can only read, a member of pg_read_all_data. Rows are read as"
        " that role, and code of their tables' owners runs as it. Needed where the other role can write, and"
        " roles that are not superusers own objects there. For a comparison it may be that of a standby."
        " It is not stored.",
    ),
]
MaxPauseOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long one attempt may stop writes: 500ms, 2s.")
]


@app.command()
@takes("json")
def plan(
    run: Run,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            envvar="SHARDIDS_SOURCE",
            help="The database: postgresql://user@host:5432/database. A role that may read is enough; as one"
            " that can write no rows are read if other roles own objects there.",
        ),
    ],
    root: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE[.COLUMN]",
            help="The table that all others are split by, and its key; default: its primary key. Without it"
            " the command proposes some.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE.COLUMN", help="A column that holds the root's key. Repeatable."),
    ] = None,
    reference: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="A table that every node gets. Repeatable.")
    ] = None,
    loose: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="A table that stays at the source. Repeatable.")
    ] = None,
    unowned: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=WHERE",
            help="Where rows go whose key is NULL: source, where they stay, or a shard. Repeatable.",
        ),
    ] = None,
    guess: Annotated[
        bool,
        typer.Option(
            "--guess", help="Where foreign keys are missing, go by names such as user_id, if the rows agree."
        ),
    ] = False,
    shards: Annotated[
        int | None, typer.Option(min=1, max=65536, help="How many shards; default: as many as are suggested.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="Read at most about as many rows of each table.")
    ] = 100_000,
    via: Annotated[
        str | None,
        typer.Option(
            envvar="SHARDIDS_RELAY",
            metavar="RELAY",
            help="The URL of the relay: an empty database of PostgreSQL 15 or later, which gives rows their"
            " shards. It is written into the plan, without its password. adopt run takes it as well.",
        ),
    ] = None,
    reader_url: ReaderOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the plan.")
    ] = Path("adopt-plan.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Read a database, and write a plan of what becomes of each table. Exits 3 if something blocks it.

    Nothing is changed at the source: it is read as of one moment, in transactions that can't write.
    """
    from shardids.adopt.plan.document import check_free, write_plan
    from shardids.adopt.plan.planning import make_plan

    if not force:
        check_free(output)
    with err.status("reading the source"):
        planned = make_plan(
            source,
            root=root,
            keys=key or (),
            references=reference or (),
            loose=loose or (),
            unowned=unowned or (),
            guess=guess,
            shard_count=shards,
            sample_rows=sample,
            via=via,
            reader=reader_url,
        )
    write_plan(planned.plan, output, comments=planned.comments, force=force)
    if run.as_json:
        print_json(
            asdict(planned.plan)
            | {"blocked": planned.is_blocked, "forecast": asdict(planned.forecast), "file": str(output)}
        )
    else:
        from shardids.cli.adopt.shown import plan_picture

        out.print(plan_picture(planned))
        err.print(f"Written to {output}")
    if planned.is_blocked:
        raise typer.Exit(BLOCKED)


@app.command()
@takes("catalog", "dry-run", "json")
def prepare(
    run: Run,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What shardids adopt plan has written.")],
    folder: DirOption = FOLDER,
    source: SourceOption = None,
    grants: Annotated[
        bool, typer.Option("--grants/--no-grants", help="Give roles the privileges that they have there.")
    ] = True,
) -> None:
    """Write migrations that make the tables of the shards and nodes like those of the source.

    They are tried on each node first, and rolled back. Read them, and run them: shardids migrate up
    """
    from shardids.adopt.plan.document import read_plan
    from shardids.adopt.run.preparing import prepare as prepare_tables
    from shardids.adopt.run.preparing import write
    from shardids.migrate.environment import Environment

    wanted = read_plan(plan)
    there = run.catalog
    with err.status("reading the source, and trying on each node"):
        prepared = prepare_tables(there, wanted, source=source, with_grants=grants)
    if folder.exists() and (prepared.node or prepared.shard):
        Environment.at(folder)
    paths = [] if run.dry else write(prepared, folder)
    if run.as_json:
        print_json(asdict(prepared) | {"files": [str(path) for path in paths]})
        return
    for line in prepared.differs:
        err.print(f"Differs: {line}")
    if run.dry:
        for title, statements in (("On each node", prepared.node), ("In each shard", prepared.shard)):
            out.print(f"-- {title}")
            for statement in statements:
                out.print(f"{statement};")
        return
    for path in paths:
        out.print(f"Written: {path}")
    if paths:
        err.print(f"Read them, and run them: shardids migrate up --dir {folder}")
        err.print("Roles that are to draw IDs: shardids grant ROLE")
    else:
        out.print("All tables are there")


MaxWalOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Abort, so that no slot keeps log, once the source or the relay keeps more than this for it:"
        " 50GB.",
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="How much of the source is read in a second, on average over each table that is copied or"
        " portion that is compared: 20MB.",
    ),
]
MaxLatencyOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Before the next table or portion is read, wait while the source takes longer for a statement"
        " that reads no table, or a standby of it is further behind: 20ms.",
    ),
]


def _limits(max_wal: str | None, rate: str | None, max_latency: str | None) -> Limits:
    from shardids.adopt.run.sparing import Limits
    from shardids.pg.notation import parse_duration_ms, parse_size_bytes

    return Limits(
        max_wal_bytes=None if max_wal is None else parse_size_bytes(max_wal),
        rate_bytes_s=None if rate is None else parse_size_bytes(rate),
        max_latency_s=None if max_latency is None else parse_duration_ms(max_latency) / 1000,
    )


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def run(
    run: Run,
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="The file that shardids adopt plan has written.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an adoption that was stopped or interrupted, from the step that it was at.",
        ),
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the nodes from following the source, until --resume.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare every row with those of the shards again, while applications write."
        ),
    ] = False,
    source: SourceOption = None,
    via: ViaOption = None,
    reader_url: ReaderOption = None,
    trust: TrustOption = None,
    max_wal: MaxWalOption = None,
    rate: RateOption = None,
    max_latency: MaxLatencyOption = None,
) -> None:
    """Copy all rows into the shards, compare them, and let the nodes follow the source.

    Applications go on using the source. Everything is checked before anything is made. While it is stopped
    the source keeps its log for the relay: look at the room on its disk. It asks whether the relay's disk has
    the room for a copy of all rows; with --resume, before it goes on with a switch that was interrupted.
    """
    from shardids.adopt import adoption
    from shardids.adopt.plan.document import read_plan
    from shardids.adopt.run.journal import open_adoption
    from shardids.cli.adopt.shown import print_check, print_done, print_relay_tables, relay_needs, shown

    limits = _limits(max_wal, rate, max_latency)

    if resume + stop + compare > 1:
        raise BadArgument("--resume, --stop and --compare exclude each other")
    if resume or stop or compare:
        option = "--resume" if resume else "--stop" if stop else "--compare"
        refuse(f"to {option}, which is for the adoption that is under way", trust=trust)
        if plan is not None:
            raise BadArgument(f"{option} goes on by the plan that the catalog has", hint=f"Leave {plan} out.")
    if stop:
        refuse(
            "to --stop, which reads no rows",
            reader_url=reader_url,
            max_wal=max_wal,
            rate=rate,
            max_latency=max_latency,
        )
        _end(run, adoption.pause(run.catalog, source=source, via=via, dry_run=run.dry), source, via)
        return
    if compare:
        refuse("to --compare, which changes nothing", dry_run=run.dry, max_wal=max_wal)
        with shown() as show:
            done = adoption.compare(
                run.catalog, source=source, via=via, reader=reader_url, limits=limits, on_event=show
            )
        print_done(done, as_json=run.as_json)
        return
    if resume:
        resume_it = partial(
            adoption.resume, run.catalog, source=source, via=via, reader=reader_url, limits=limits
        )
        under_way = open_adoption(run.catalog)
        if under_way is not None and adoption.resumes_switch(under_way):
            _ask(run, _stops_writes(keeps_back=under_way.keeps_back), resume_it)
        with shown() as show:
            done = resume_it(on_event=show, dry_run=run.dry)
        _end(run, done, source, via)
        return
    if plan is None:
        raise BadArgument(
            "which plan?", hint="shardids adopt run PLAN; to go on: shardids adopt run --resume"
        )
    wanted = read_plan(plan)
    if run.dry:
        found = adoption.check(
            run.catalog, wanted, source=source, via=via, reader=reader_url, trusted=trust or ()
        )
        print_check(found, as_json=run.as_json)
        return
    if not run.yes:
        print_relay_tables(wanted.relay_bytes, to=err)
    run.ask(f"{relay_needs(wanted.relay_bytes)}. Has its disk the room?")
    with shown() as show:
        done = adoption.run(
            run.catalog,
            wanted,
            source=source,
            via=via,
            reader=reader_url,
            trusted=trust or (),
            limits=limits,
            on_event=show,
        )
    print_done(done, as_json=run.as_json)


def _ask(run: Run, question: str, command: Callable[..., Result]) -> None:
    """Ask before a command, once its dry run has found nothing that refuses it."""
    if not (run.yes or run.dry):
        command(dry_run=True)
    run.ask(question)


def _stops_writes(*, keeps_back: bool) -> str:
    return "Stop writes at the source?" if keeps_back else "Stop writes at the source for good?"


def _end(run: Run, done: Result, source: str | None, via: str | None) -> None:
    """Print how far a command has brought the adoption; of a dry run, how far it is."""
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import print_done, print_status

    if not run.dry:
        print_done(done, as_json=run.as_json)
        return
    print_status(adoption.status(run.catalog, source=source, via=via), as_json=run.as_json)
    err.print("No obstacles found; nothing was changed")


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def abort(run: Run, source: SourceOption = None, via: ViaOption = None) -> None:
    """Undo an adoption: leave the source as it was, and empty the shards of the rows that were copied.

    After "adopt back" it empties the shards; a return that was interrupted is given up.
    """
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import shown

    abort = partial(adoption.abort, run.catalog, source=source, via=via)
    _ask(run, "Remove the rows that were copied into the shards?", abort)
    with shown() as show:
        done = abort(on_event=show, dry_run=run.dry)
    _end(run, done, source, via)


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def switch(
    run: Run,
    source: SourceOption = None,
    via: ViaOption = None,
    max_pause: MaxPauseOption = "2s",
    keep_back: Annotated[
        bool, typer.Option("--keep-back", help="Send writes to the shards back to the source.")
    ] = False,
) -> None:
    """Stop writes at the source and let the shards take them.

    Applications that still use the source get an error when they write, from the first moment on. With
    --keep-back the source follows the shards, and takes over again with "adopt back"; without it there is
    no way back.
    """
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import pause_seconds, print_changes, shown

    pause_s = pause_seconds(max_pause)
    switch = partial(
        adoption.switch, run.catalog, source=source, via=via, max_pause_s=pause_s, keep_back=keep_back
    )
    _ask(run, _stops_writes(keeps_back=keep_back), switch)
    with shown() as show:
        done = switch(on_event=show, dry_run=run.dry)
    _end(run, done, source, via)
    if not (run.as_json or run.dry):
        print_changes(run.catalog, is_kept=done.outcome is None)


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def back(run: Run, source: SourceOption = None, max_pause: MaxPauseOption = "2s") -> None:
    """Stop writes to the shards and let the source take them again, after a switch with --keep-back.

    The shards are left fenced, with their rows: "adopt abort" empties them.
    """
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import pause_seconds, shown

    pause_s = pause_seconds(max_pause)
    back = partial(adoption.back, run.catalog, source=source, max_pause_s=pause_s)
    _ask(run, "Stop writes to the shards, and return to the source?", back)
    with shown() as show:
        done = back(on_event=show, dry_run=run.dry)
    _end(run, done, source, None)
    if not (run.as_json or run.dry):
        out.print("The source takes writes. The shards refuse them, and keep their rows.")
        err.print("To empty the shards and let them take writes: shardids adopt abort")


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def finish(run: Run, source: SourceOption = None) -> None:
    """Give the way back up: the source no longer follows the shards, and keeps refusing writes."""
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import shown

    finish = partial(adoption.finish, run.catalog, source=source)
    _ask(run, "Give up the way back to the source?", finish)
    with shown() as show:
        done = finish(on_event=show, dry_run=run.dry)
    _end(run, done, source, None)


@app.command()
@takes("catalog", "json")
def status(run: Run, source: SourceOption = None, via: ViaOption = None) -> None:
    """Show how far the adoption is: its step, and how far each node is behind the source."""
    from shardids.adopt import adoption
    from shardids.cli.adopt.shown import print_status

    print_status(adoption.status(run.catalog, source=source, via=via), as_json=run.as_json)
