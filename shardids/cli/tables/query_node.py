"""``shardids query-node``: manages the database whose views show every table with the rows of all shards."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids.cli.command import Run, takes
from shardids.cli.printing import err, out, print_warnings
from shardids.errors import ClusterConflict
from shardids.pg.notation import counted

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
@takes("catalog", "dry-run")
def create(
    run: Run,
    on: Annotated[str | None, typer.Option(help="The node that is to be the query node.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Or another database; a password in it is used now but not kept.")
    ] = None,
    sharded: Annotated[list[str] | None, typer.Option(metavar="TABLE", help=_SHARDED)] = None,
    reference: Annotated[list[str] | None, typer.Option(metavar="TABLE", help=_REFERENCE)] = None,
    store_password: StorePasswordOption = False,
) -> None:
    """Make a node, or another database, the query node, instead of the present one. Idempotent."""
    from shardids.tables import views

    there = run.catalog
    made = views.create_query_node(
        there,
        node=on,
        url=url,
        sharded=sharded or (),
        reference=reference or (),
        store_password=store_password,
        dry_run=run.dry,
    )
    print_warnings(made.left_out)
    report(run, made.statements, "made")


@app.command()
@takes("catalog", "json")
def status(run: Run) -> None:
    """Show which database it is, how many tables it shows, and its faults. Exits 3 on a fault."""
    from shardids.tables import views

    there = run.catalog
    found = views.state_of(there)
    if found is None:
        run.print_rows([], empty="No query node. To make one: shardids query-node create --on NODE")
        return
    faults = list(map(str, found.faults))
    row: dict[str, object] = {"node": found.there.node, "url": found.there.url, "tables": found.tables}
    run.print_rows([row | {"faults": faults} if run.as_json else row])
    for fault in faults:
        err.print(fault)
    if faults:
        raise typer.Exit(3)


@app.command()
@takes("catalog", "dry-run")
def refresh(run: Run, store_password: StorePasswordOption = False) -> None:
    """Make it show today's tables, and read each shard from its owner. Other commands do so themselves."""
    from shardids.tables import views

    there = run.catalog
    done = views.refresh_query_node(there, store_password=store_password, dry_run=run.dry)
    if done is None:
        raise ClusterConflict(
            "the cluster has no query node", hint="To make one: shardids query-node create --on NODE"
        )
    print_warnings(done.left_out)
    report(run, done.statements, "refreshed")


@app.command()
@takes("catalog", "dry-run")
def drop(run: Run) -> None:
    """Drop its views, and those on the nodes. Fails if other objects use them."""
    from shardids.tables import views

    there = run.catalog
    done = views.drop_query_node(there, dry_run=run.dry)
    report(run, done, "dropped")


def report(run: Run, done: list[str], word: str) -> None:
    """Print the statements of a dry run, or how many ran."""
    if run.dry:
        for statement in done:
            out.print(f"{statement};")
    if not done:
        out.print("The query node is up to date")
    elif run.dry:
        err.print("Nothing was changed")
    else:
        out.print(f"Query node {word}: {counted(len(done), 'statement')}")
