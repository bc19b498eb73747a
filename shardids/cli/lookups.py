"""``shardids lookup``: manages columns that are unique over all shards."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids import lookups
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, YesOption, confirm, opened
from shardids.cli.output import out, print_rows

app = typer.Typer(
    help="Columns that are unique over all shards, and find a row's shard.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="TABLE.COLUMN", help="The column, as in every shard.")]


@app.command()
def create(name: NameArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Make the place where a column's values are claimed. Idempotent; grants follow those of the table."""
    with opened(catalog) as there:
        made = lookups.create(there, name, dry_run=dry_run)
    out.print(f"{name}: claims {'would be' if dry_run else 'are'} made in {len(made)} shards", markup=False)
    out.print(
        f"When all applications have the model with lookup_key(): shardids lookup backfill {name}",
        markup=False,
    )


@app.command("list")
def list_lookups(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the look-ups, and whether rows can be looked up by them."""
    with opened(catalog) as there:
        rows = lookups.listed(there)
    print_rows(rows, as_json=as_json, empty="There are no look-ups yet.")


@app.command()
def backfill(name: NameArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Claim the values of rows without a claim; from then on, statements that claim nothing are refused."""
    with opened(catalog) as there:
        done = lookups.backfill(there, name, dry_run=dry_run)
    said = "have no claim" if dry_run else "were claimed"
    out.print(f"{name}: {done.claimed:,} of {done.rows:,} rows in {done.shards} shards {said}", markup=False)


@app.command()
def sweep(name: NameArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Delete the claims of rows that were deleted, got another value or never came."""
    with opened(catalog) as there:
        done = lookups.sweep(there, name, dry_run=dry_run)
    said = "have no row" if dry_run else "had no row and were deleted"
    out.print(f"{name}: {done.given_up:,} of {done.claims:,} claims {said}", markup=False)
    if done.busy:
        out.print(f"{done.busy:,} more may still get one: sweep again later", markup=False)


@app.command()
def drop(
    name: NameArgument, catalog: CatalogOption, dry_run: DryRunOption = False, yes: YesOption = False
) -> None:
    """Drop a look-up and its claims: values can then come twice. Models that still have it can't write."""
    with opened(catalog) as there:
        if not dry_run:
            lookups.drop(there, name, dry_run=True)
            confirm(f"Drop look-up {name}, with all claims?", yes=yes)
        dropped = lookups.drop(there, name, dry_run=dry_run)
    out.print(
        f"{name}: claims {'would be' if dry_run else 'are'} dropped in {len(dropped)} shards", markup=False
    )
