"""``shardids adopt prepare``: the shards' tables, made from the source's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardids.adopt.plan_file import read_plan
from shardids.adopt.preparing import prepare as prepare_tables
from shardids.adopt.preparing import write
from shardids.cli.adopt_run import SourceOption
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.migrate_options import FOLDER, DirOption
from shardids.cli.output import err, out


def prepare(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What shardids adopt plan has written.")],
    catalog: CatalogOption,
    folder: DirOption = FOLDER,
    source: SourceOption = None,
    grants: Annotated[
        bool, typer.Option("--grants/--no-grants", help="Give roles the privileges that they have there.")
    ] = True,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write migrations that make the tables of the shards and nodes like those of the source.

    They are tried on each node first, and rolled back. Read them, and run them: shardids migrate up
    """
    wanted = read_plan(plan)
    with opened(catalog) as there, err.status("reading the source, and trying on each node"):
        prepared = prepare_tables(there, wanted, source=source, with_grants=grants)
    paths = [] if dry_run else write(prepared, folder)
    if as_json:
        print_json(asdict(prepared) | {"files": [str(path) for path in paths]})
        return
    for line in prepared.differs:
        err.print(f"Differs: {line}", markup=False)
    if dry_run:
        for title, statements in (("On each node", prepared.node), ("In each shard", prepared.shard)):
            out.print(f"-- {title}", markup=False)
            for statement in statements:
                out.print(f"{statement};", markup=False, highlight=False)
        return
    for path in paths:
        out.print(f"Written: {path}", markup=False)
    if paths:
        err.print(f"Read them, and run them: shardids migrate up --dir {folder}", markup=False)
        err.print("Roles that are to draw IDs: shardids grant ROLE", markup=False)
    else:
        out.print("All tables are there")
