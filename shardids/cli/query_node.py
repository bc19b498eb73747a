"""``shardids query-node``: manages the database whose views show every table with the rows of all shards."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids import views
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened
from shardids.cli.output import out, print_rows, print_warnings
from shardids.errors import ClusterConflict

app = typer.Typer(help="The database whose views show the rows of all shards.", no_args_is_help=True)

StorePasswordOption = Annotated[
    bool,
    typer.Option(
        "--store-password",
        help="Store the nodes' passwords in the query node's user mappings, for nodes that ask it for one.",
    ),
]
_SHARDED = "Its rows are each in one shard, though no ID in them says so; repeatable."
_REFERENCE = "It has the same rows in every shard, and is read from one; repeatable."


@app.command()
def create(
    catalog: CatalogOption,
    on: Annotated[str | None, typer.Option(help="The node that is to be the query node.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Or another database; a password in it is used now but not kept.")
    ] = None,
    sharded: Annotated[list[str] | None, typer.Option(metavar="TABLE", help=_SHARDED)] = None,
    reference: Annotated[list[str] | None, typer.Option(metavar="TABLE", help=_REFERENCE)] = None,
    store_password: StorePasswordOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Make a node, or another database, the query node, instead of the present one. Idempotent."""
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
    _report(made.statements, dry_run, "made")


@app.command()
def status(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """Show which database it is, how many tables it shows, and whether it reads each shard from its owner."""
    with opened(catalog) as there:
        row = views.query_node_row(there)
    print_rows(
        [] if row is None else [row],
        as_json=as_json,
        empty="No query node. To make one: shardids query-node create --on NODE",
    )


@app.command()
def refresh(
    catalog: CatalogOption, store_password: StorePasswordOption = False, dry_run: DryRunOption = False
) -> None:
    """Make it show today's tables, and read each shard from its owner. Other commands do so themselves."""
    with opened(catalog) as there:
        done = views.refresh_query_node(there, store_password=store_password, dry_run=dry_run)
    if done is None:
        raise ClusterConflict(
            "the cluster has no query node", hint="To make one: shardids query-node create --on NODE"
        )
    print_warnings(done.left_out)
    _report(done.statements, dry_run, "refreshed")


@app.command()
def grant(
    role: Annotated[str, typer.Argument(help="A role of the query node's server.")],
    catalog: CatalogOption,
    dry_run: DryRunOption = False,
) -> None:
    """Let a role read every table of the query node, also those to come, with its owner's rights."""
    with opened(catalog) as there:
        done = views.grant(there, role, dry_run=dry_run)
    _report(done, dry_run, "changed")


@app.command()
def drop(catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Drop its views, and those on the nodes. Fails if other objects use them."""
    with opened(catalog) as there:
        done = views.drop_query_node(there, dry_run=dry_run)
    _report(done, dry_run, "dropped")


def _report(done: list[str], dry_run: bool, word: str) -> None:
    if dry_run:
        for statement in done:
            out.print(f"{statement};", markup=False)
    if not done:
        out.print("The query node is up to date")
    elif not dry_run:
        out.print(f"Query node {word}: {len(done)} statements")
