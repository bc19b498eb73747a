"""``shardids compare``: measures the key schemes side by side, and writes the report."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardids.cli.common import JsonOption
from shardids.cli.output import err, out
from shardids.compare import store
from shardids.compare.report import page, table
from shardids.compare.results import Comparison
from shardids.compare.run import compare as measure
from shardids.errors import BadArgument


def compare(
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute instead of ten; the figures are rough.")
    ] = False,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only these; shardids baseline list tells all. [default: all]"),
    ] = None,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a report with charts.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the tables as Markdown.")
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Measure nothing: report what an earlier --json printed."
        ),
    ] = None,
) -> None:
    """Measure all key schemes side by side, on servers of this machine that are started for it.

    Draws, inserts, storage, order, and what is issued twice at full speed, when clocks step back and when
    servers are killed, lost or added. Takes two cores and some gigabytes of disk for some minutes; Ctrl-C
    ends all servers and removes their files.
    """
    files = [file for file in (html, markdown) if file is not None]
    for file in files:
        _check_writable(file)
    if html is not None:
        page.check_libraries()
    if as_json or load is not None:
        store.check_libraries()
    comparison = _loaded(load) if load else _measured(schemes, quick=quick)
    if as_json:
        typer.echo(store.to_json(comparison))
    else:
        table.print_table(comparison, out)
    if html is not None:
        html.write_text(page.html(comparison), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(table.markdown(comparison), encoding="utf-8")
    for file in files:
        err.print(f"Written: {file}", markup=False)


def _measured(schemes: str | None, *, quick: bool) -> Comparison:
    names = [name.strip() for name in schemes.split(",")] if schemes is not None else []
    command = shlex.join(["shardids", *sys.argv[1:]])
    with err.status("") as status:
        return measure(names, quick=quick, command=command, say=status.update)


def _loaded(file: Path) -> Comparison:
    try:
        return store.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"{file} can't be read: {error}") from error


def _check_writable(file: Path) -> None:
    # Fails before minutes of measuring, not after.
    place = file if file.exists() else file.parent
    if not (place.exists() and os.access(place, os.W_OK)):
        raise BadArgument(f"{file} can't be written", hint="Name a file in a folder that you may write to.")
