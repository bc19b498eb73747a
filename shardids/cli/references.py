"""``shardids reference``: small tables with the same rows on every node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardids import references, views
from shardids.catalog.references import references_of
from shardids.cli.common import (
    CatalogOption,
    DryRunOption,
    JsonOption,
    TrustOption,
    YesOption,
    confirm,
    opened,
)
from shardids.cli.output import out, print_error, print_rows, print_warnings

app = typer.Typer(
    help="Small tables with the same rows on every node, which rows of all shards can refer to.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The table, without its schema.")]
_EMPTY = "No reference table yet. To make one: shardids reference create NAME --writer NODE"


@app.command()
def create(
    name: NameArgument,
    catalog: CatalogOption,
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="NODE", help="Where reference tables are written to; needed for the first, for all alike."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:BASE", help="The models that define it, if it is not there yet."
        ),
    ] = None,
    trust: TrustOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Make a table of schema shardids_ref the same on all nodes; repeated, complete what was interrupted."""
    metadata = None
    if models is not None:
        from shardids.migrate.scaffold import load_metadata

        metadata = load_metadata(models)[0]
    with opened(catalog) as there:
        node = references.create_table(
            there, name, writer=writer, models=metadata, trusted=trust or (), dry_run=dry_run
        )
        print_warnings(() if dry_run else views.follow(there))
    would = "would be" if dry_run else "is"
    out.print(f'Reference table {name} {would} on all nodes, and written to on node "{node}"', markup=False)


@app.command("list")
def list_tables(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the reference tables."""
    with opened(catalog) as there:
        found = references.tables(there)
    print_rows([asdict(one) for one in found], as_json=as_json, empty=_EMPTY)


@app.command()
def status(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """Show how each node follows the writer; exit 3 if one does not."""
    with opened(catalog) as there:
        found = references.status(there)
    print_rows([asdict(one) for one in found], as_json=as_json, empty=_EMPTY)
    if any(one.state not in ("follows", "is written to") for one in found):
        raise typer.Exit(3)


@app.command()
def delete(
    name: NameArgument,
    key: Annotated[
        list[str], typer.Argument(metavar="KEY…", help="The row's primary key, a value a column.")
    ],
    catalog: CatalogOption,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Delete a row that no row of any node refers to. Repeated, it completes what was interrupted."""
    if not dry_run:
        confirm(f"Delete row {', '.join(key)} of {name} on all nodes?", yes=yes)
    with opened(catalog) as there:
        references.delete_row(there, name, key, dry_run=dry_run)
    out.print(f"{'Would delete' if dry_run else 'Deleted'} row {', '.join(key)} of {name}", markup=False)


@app.command()
def drop(
    name: NameArgument, catalog: CatalogOption, yes: YesOption = False, dry_run: DryRunOption = False
) -> None:
    """Drop a reference table, to which no table refers, on all nodes."""
    if not dry_run:
        confirm(f"Drop reference table {name} on all nodes?", yes=yes)
    with opened(catalog) as there:
        references.drop_table(there, name, dry_run=dry_run)
        print_warnings(() if dry_run else views.follow(there))
    out.print(f"{'Would drop' if dry_run else 'Dropped'} reference table {name}", markup=False)


@app.command()
def move(
    to: Annotated[str, typer.Option(metavar="NODE", help="Where they are written to from then on.")],
    catalog: CatalogOption,
    dry_run: DryRunOption = False,
) -> None:
    """Let reference tables be written to on another node; repeated, complete what was interrupted."""
    with opened(catalog) as there:
        before = references.move_writer(there, to, dry_run=dry_run)
        print_warnings(() if dry_run else views.follow(there))
    would = "would be" if dry_run else "are"
    out.print(f'Reference tables {would} written to on node "{to}", before on "{before}"', markup=False)


@app.command()
def repair(catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Bring nodes that don't follow, or whose rows differ, to the writer's rows, and let them follow."""
    with opened(catalog) as there:
        done = references.repair(there, dry_run=dry_run)
        has_writer = references_of(there).writer is not None
    for one in done:
        if not one.error:
            what = "would be repaired" if dry_run else "repaired"
            out.print(f'Node "{one.node}" {what}: {one.wrong}', markup=False)
    failed = [one for one in done if one.error]
    for one in failed:
        print_error(f'node "{one.node}" is not repaired: {one.error}', one.hint)
    if failed:
        raise typer.Exit(1)
    if not done:
        out.print("All nodes follow the writer, with the same rows" if has_writer else _EMPTY, markup=False)
