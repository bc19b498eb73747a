"""``shardids adopt``: an existing database into shards."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardids.cli import adopt_back, adopt_function, adopt_prepare, adopt_run, adopt_table
from shardids.cli.adopt_run import ReaderOption
from shardids.cli.common import JsonOption, print_json
from shardids.cli.output import err, out

app = typer.Typer(help="Take an existing PostgreSQL database into shards.", no_args_is_help=True)

BLOCKED = 3
"""The exit code of a plan that can't be run."""


@app.command()
def plan(
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
        str,
        typer.Option(
            metavar="TABLE[.COLUMN]",
            help="The table that all others are split by, and its key; default: its primary key.",
        ),
    ],
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
            help="The URL of a relay: an empty database of PostgreSQL 15 or later that gives rows their"
            " shards where the source can't. It is written into the plan, without its password.",
        ),
    ] = None,
    reader_url: ReaderOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the plan.")
    ] = Path("adopt-plan.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a database, and write a plan of what becomes of each table. Exits 3 if something blocks it.

    Nothing is changed at the source: it is read as of one moment, in transactions that can't write.
    """
    from shardids.adopt.plan_file import check_free, write_plan
    from shardids.adopt.planning import make_plan

    if not force:
        check_free(output)
    with err.status("reading the source"):
        planned = make_plan(
            source,
            root=root,
            keys=key or (),
            references=reference or (),
            loose=loose or (),
            shard_count=shards,
            sample_rows=sample,
            via=via,
            reader=reader_url,
        )
    write_plan(planned.plan, output, comments=planned.comments, force=force)
    if as_json:
        print_json(
            asdict(planned.plan)
            | {"blocked": planned.is_blocked, "forecast": asdict(planned.forecast), "file": str(output)}
        )
    else:
        from shardids.cli.adopt_picture import plan_picture

        out.print(plan_picture(planned))
        err.print(f"Written to {output}", markup=False)
    if planned.is_blocked:
        raise typer.Exit(BLOCKED)


app.command()(adopt_prepare.prepare)
for _name, _command in (adopt_run.COMMANDS | adopt_back.COMMANDS).items():
    app.command(_name)(_command)
app.command()(adopt_table.table)
app.command()(adopt_function.function)
