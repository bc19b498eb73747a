"""``shardids load``: a CSV or Parquet file into the shards of its rows."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardids.cli.command import Run, TrustOption, refuse, takes
from shardids.cli.printing import err, out, print_json
from shardids.errors import BadArgument
from shardids.pg.notation import counted

STDIN = "-"


@takes("catalog", "dry-run", "json")
def load(
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file ending in .csv or .parquet; - is stdin, with --name and --format csv.",
        ),
    ],
    table: Annotated[str, typer.Option(help="The table's name in every shard.")],
    key: Annotated[str | None, typer.Option(help="The column that the rows are sharded by.")] = None,
    region: Annotated[
        str | None, typer.Option(help="The region of all rows: their keys are among its shards.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", help="The column whose IDs name the shard, if foreign keys do not.")
    ] = None,
    shard: Annotated[int | None, typer.Option(help="One shard for all rows.")] = None,
    file_format: Annotated[
        str | None, typer.Option("--format", help="csv or parquet, if the file's name does not say it.")
    ] = None,
    delimiter: Annotated[str, typer.Option(help="What separates the fields of a CSV file.")] = ",",
    columns: Annotated[
        str | None, typer.Option(help="The columns of a CSV file without a header: NAME,NAME…")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The load's name in the shards; default: the file's name.")
    ] = None,
    rejects: Annotated[
        Path | None, typer.Option(help="File for rejected records; default: NAME.rejects.csv, here.")
    ] = None,
    max_rejects: Annotated[int, typer.Option(min=0, help="Stop when more records are rejected.")] = 1_000,
    trust: TrustOption = None,
) -> None:
    """Load a CSV or Parquet file by COPY, each row into its shard; run again, it goes on where it ended."""
    from shardids import Cluster
    from shardids.tables.load import Loaded, LoadSettings
    from shardids.tables.load import load as load_file

    if file == STDIN and name is None:
        raise BadArgument("a load from stdin needs a name", hint="Give --name.")
    found_format = _format_of(file, file_format)
    if found_format == "parquet":
        refuse("to a Parquet file, which names its columns", delimiter=delimiter != ",", columns=columns)
    called = name if name is not None else Path(file).name
    settings = LoadSettings(
        table=table,
        key=key,
        region=region,
        id_=id_column,
        shard=shard,
        format=found_format,
        delimiter=delimiter,
        columns=None if columns is None else columns.split(","),
        name=called,
        rejects=rejects or Path(f"{Path(called).name}.rejects.csv"),
        most_rejects=max_rejects,
        trusted=tuple(trust or ()),
        dry_run=run.dry,
    )
    try:
        opened = nullcontext(sys.stdin.buffer) if file == STDIN else Path(file).open("rb")  # noqa: SIM115 -- entered below
    except OSError as error:
        raise BadArgument(f"{file} can't be read: {error.strerror}") from None
    with opened as stream, Cluster.connect(run.url, listen=False) as cluster, err.status("") as status:

        def show(loaded: Loaded) -> None:
            status.update(f"{counted(loaded.rows, 'row')} loaded, {loaded.rejected:,} rejected")

        loaded = load_file(cluster, stream, settings, show)
    _report(loaded.rejected, loaded.unlisted, settings.rejects, run.dry)
    if run.as_json:
        print_json(asdict(loaded) | {"rejects": str(settings.rejects) if loaded.rejected else None})
    else:
        were = "was" if loaded.already == 1 else "were"
        already = f"; {loaded.already:,} {were} there already" if loaded.already else ""
        verb = "Would load" if run.dry else "Loaded"
        rows, shards = counted(loaded.rows, "row"), counted(len(loaded.by_shard), "shard")
        out.print(f"{verb} {rows} into {shards}{already}.")
    if loaded.rejected:
        raise typer.Exit(1)


def _report(rejected: int, unlisted: int, rejects: Path, dry_run: bool) -> None:
    if rejected:
        where = "" if dry_run or rejected == unlisted else f": see {rejects}"
        if unlisted:
            where += f"; {rejects} lacks {unlisted:,} of them, which an earlier run wrote to another file"
        err.print(f"[yellow]{counted(rejected, 'record')} rejected[/]", markup=True, end="")
        err.print(where)


def _format_of(file: str, given: str | None) -> str:
    suffix = given or Path(file).suffix.removeprefix(".").lower()
    if suffix not in ("csv", "parquet"):
        raise BadArgument(f"{file}: the format is not known", hint="Give --format csv or --format parquet.")
    if suffix == "parquet" and file == STDIN:
        raise BadArgument("a Parquet file can't be read from stdin: its index is at its end")
    return suffix
