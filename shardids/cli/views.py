"""``shardids view``: manages the views that read a table of all shards."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids import views
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened
from shardids.cli.output import out, print_rows, print_warnings
from shardids.errors import BadArgument
from shardids.views.query_node import ALL_TABLES

app = typer.Typer(help="A table of all shards as one view, by postgres_fdw.", no_args_is_help=True)

StorePasswordOption = Annotated[
    bool,
    typer.Option(
        "--store-password",
        help="Store the nodes' passwords in the user mappings; needed unless the view's owner is a"
        " superuser.",
    ),
]

NameArgument = Annotated[str | None, typer.Argument(help="The view's name, in schema shardids_views.")]
AllOption = Annotated[
    bool, typer.Option("--all", help="All tables: the query node, with its views in schema shardids_query.")
]


@app.command()
def create(
    catalog: CatalogOption,
    name: NameArgument = None,
    table: Annotated[str | None, typer.Option(help="The table's name in every shard.")] = None,
    id_column: Annotated[
        str, typer.Option("--id", help="The column whose IDs belong to the row's shard.")
    ] = "id",
    on: Annotated[str | None, typer.Option(help="The node to create the view on.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="The database to create it in, if not on a node; its password is not stored."),
    ] = None,
    all_tables: AllOption = False,
    sharded: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE",
            help="With --all: its rows are each in one shard, though no ID in them says so; repeatable.",
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE",
            help="With --all: it has the same rows in every shard, and is read from one; repeatable.",
        ),
    ] = None,
    store_password: StorePasswordOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Create a read-only view over a table of all shards, or over every table, or bring it up to date."""
    if all_tables:
        if name is not None or table is not None:
            raise BadArgument("--all makes a view of every table, so it takes neither a NAME nor --table")
        with opened(catalog) as there:
            made = views.create_query_node(
                there,
                node=on,
                url=url,
                sharded=sharded or (),
                reference=reference or (),
                store_password=store_password,
                dry_run=dry_run,
            )
        print_warnings(made.left_out)
        _report(ALL_TABLES, made.statements, dry_run, "created")
        return
    if name is None or table is None:
        raise BadArgument("a view has a NAME and a --table", hint="For views of all tables: --all")
    if sharded or reference:
        raise BadArgument("--sharded and --reference go with --all")
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
    """Make a view, or all and the query node, read every shard from its owner, with today's columns."""
    with opened(catalog) as there:
        if name is None:
            done = views.refresh_all(there, store_password=store_password, dry_run=dry_run)
        else:
            done = {name: views.refresh(there, name, store_password=store_password, dry_run=dry_run)}
    for one, statements in done.items():
        _report(one, statements, dry_run, "refreshed")


@app.command()
def drop(
    catalog: CatalogOption,
    name: NameArgument = None,
    all_tables: AllOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Drop a view and its foreign tables, or all of the query node. Fails if other objects use a view."""
    if all_tables == (name is not None):
        raise BadArgument("what to drop is a view's NAME, or --all for the query node")
    with opened(catalog) as there:
        done = (
            views.drop_query_node(there, dry_run=dry_run)
            if name is None
            else views.drop(there, name, dry_run=dry_run)
        )
    _report(name or ALL_TABLES, done, dry_run, "dropped")


def _report(name: str, done: list[str], dry_run: bool, word: str) -> None:
    if dry_run:
        for statement in done:
            out.print(f"{statement};", markup=False)
    elif done:
        out.print(f'View "{name}" {word}: {len(done)} statements')
    if not done:
        out.print(f'View "{name}" is up to date')
