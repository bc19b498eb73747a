"""``shardids view``: manages the views that read a table of all shards."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids import views
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened
from shardids.cli.output import out, print_rows

app = typer.Typer(help="A table of all shards as one view, by postgres_fdw.", no_args_is_help=True)

StorePasswordOption = Annotated[
    bool,
    typer.Option(
        "--store-password",
        help="Store the nodes' passwords in the user mappings; needed unless the view's owner is a"
        " superuser.",
    ),
]
NameArgument = Annotated[str, typer.Argument(help="The view's name, in schema shardids_views.")]


@app.command()
def create(
    name: NameArgument,
    catalog: CatalogOption,
    table: Annotated[str, typer.Option(help="The table's name in every shard.")],
    id_column: Annotated[
        str, typer.Option("--id", help="The column whose IDs belong to the row's shard.")
    ] = "id",
    on: Annotated[str | None, typer.Option(help="The node to create the view on.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="The database to create it in, if not on a node; its password is not stored."),
    ] = None,
    store_password: StorePasswordOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Create a read-only view over a table of all shards, or bring it up to date."""
    with opened(catalog) as there:
        done = views.create(
            there,
            name,
            table=table,
            id_column=id_column,
            node=on,
            url=url,
            store_password=store_password,
            dry_run=dry_run,
        )
    _report(name, done, dry_run, "created")


@app.command("list")
def list_views(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the views, where they are, and how many shards each does not read from their owner."""
    with opened(catalog) as there:
        rows = views.listed(there)
    print_rows(
        rows, as_json=as_json, empty="No views yet. To create one: shardids view create NAME --table TABLE"
    )


@app.command()
def refresh(
    catalog: CatalogOption,
    name: Annotated[str | None, typer.Argument(help="The view's name; without it, all views.")] = None,
    store_password: StorePasswordOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Make a view read every shard from its owner, with the columns that the table has now."""
    with opened(catalog) as there:
        if name is None:
            done = views.refresh_all(there, store_password=store_password, dry_run=dry_run)
        else:
            done = {name: views.refresh(there, name, store_password=store_password, dry_run=dry_run)}
    for one, statements in done.items():
        _report(one, statements, dry_run, "refreshed")


@app.command()
def drop(name: NameArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Drop a view and its foreign tables. Fails if other objects use the view."""
    with opened(catalog) as there:
        done = views.drop(there, name, dry_run=dry_run)
    _report(name, done, dry_run, "dropped")


def _report(name: str, done: list[str], dry_run: bool, word: str) -> None:
    if dry_run:
        for statement in done:
            out.print(f"{statement};", markup=False)
    elif done:
        out.print(f'View "{name}" {word}: {len(done)} statements')
    if not done:
        out.print(f'View "{name}" is up to date')
