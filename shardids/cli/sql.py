"""``shardids sql``: shows the SQL files, exactly as shardids runs them."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids.catalog.sqlfiles import read_sql, sql_names
from shardids.cli.common import JsonOption, print_json

app = typer.Typer(help="Read the SQL that shardids installs.", no_args_is_help=True)


@app.command("list")
def list_files(as_json: JsonOption = False) -> None:
    """List the SQL files."""
    if as_json:
        print_json(list(sql_names()))
        return
    for name in sql_names():
        typer.echo(name)


@app.command()
def show(name: Annotated[str, typer.Argument(help="For example: engine/engine.v1")]) -> None:
    """Print one SQL file."""
    typer.echo(read_sql(name), nl=False)
