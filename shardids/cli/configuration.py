"""``shardids validate-config``: whether what an application is configured with can be used."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardids.cli.common import CatalogOption, JsonOption, opened, print_json
from shardids.cli.output import out
from shardids.doctor.configuration import Configuration, validate
from shardids.ids.layout import Layout

_USUAL_FOLDER = Path("migrations")


def validate_config(
    catalog: CatalogOption,
    layout: Annotated[
        str | None,
        typer.Option(
            envvar="SHARDIDS_LAYOUT", metavar="LAYOUT", help="The layout that the cluster must have."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            envvar="SHARDIDS_MIGRATIONS",
            metavar="DIR",
            help="The folder of migrations; ./migrations, if that is one.",
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="PACKAGE.MODULE:BASE", help="The models, whose IDs must be bigint.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether catalog, layout, nodes, migrations and models can be used; exit 1 if not."""
    if folder is None and (_USUAL_FOLDER / "env.py").is_file():
        folder = _USUAL_FOLDER
    expected = None if layout is None else Layout.parse(layout)
    with opened(catalog) as there:
        parts = validate(Configuration(catalog=there, layout=expected, migrations=folder, models=models))
    usable = all(part.usable for part in parts)
    if as_json:
        print_json({"usable": usable, "parts": [asdict(part) for part in parts]})
    else:
        for part in parts:
            sign = "[green]ok   [/]" if part.usable else "[bold red]wrong[/]"
            out.print(f"{sign} [bold]{part.part:<10}[/] ", end="")
            out.print(part.what, markup=False)
            if part.to_do:
                out.print(f"      → {part.to_do}", markup=False, style="cyan")
    if not usable:
        raise typer.Exit(1)
