"""``shardids reference``: small tables with the same rows on every node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardids.cli.command import Run, TrustOption, takes
from shardids.cli.printing import out, print_error, print_json, print_rows, print_warnings

app = typer.Typer(
    help="Small tables with the same rows on every node, which rows of all shards can refer to.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The table, without its schema.")]
_EMPTY = "No reference table yet. To make one: shardids reference create NAME --writer NODE"


@app.command()
@takes("catalog", "dry-run")
def create(
    run: Run,
    name: NameArgument,
    writer: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="The writer of all reference tables; required for the first one."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:BASE", help="The models that define it, if it is not there yet."
        ),
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Make a table of schema shardids_ref the same on all nodes; run again, complete an interrupted call."""
    from shardids.tables import references, views

    metadata = None
    if models is not None:
        from shardids.migrate.scaffold import load_metadata

        metadata = load_metadata(models)[0]
    there = run.catalog
    node = references.create_table(
        there, name, writer=writer, models=metadata, trusted=trust or (), dry_run=run.dry
    )
    print_warnings(() if run.dry else views.follow(there))
    would = "would be" if run.dry else "is"
    out.print(f'Reference table {name} {would} on all nodes, and written to on node "{node}"')


@app.command("list")
@takes("catalog", "json")
def list_tables(run: Run) -> None:
    """List the reference tables, and how each node follows the writer; exit 3 if one does not."""
    from shardids.tables import references

    tables = [asdict(one) for one in references.tables(run.catalog)]
    nodes = references.status(run.catalog)
    if run.as_json:
        print_json({"tables": tables, "nodes": [asdict(one) for one in nodes]})
    else:
        print_rows(tables, empty=_EMPTY)
        if nodes:
            out.print("")
            print_rows([asdict(one) for one in nodes])
    if any(one.state not in ("follows", "is written to") for one in nodes):
        raise typer.Exit(3)


@app.command()
@takes("catalog", "dry-run", "yes")
def delete(
    run: Run,
    name: NameArgument,
    key: Annotated[
        list[str], typer.Argument(metavar="KEY…", help="The row's primary key, one value per column.")
    ],
) -> None:
    """Delete a row that no row of any node refers to. Run again, it completes an interrupted call."""
    from shardids.tables import references

    run.ask(f"Delete row {', '.join(key)} of {name} on all nodes?")
    there = run.catalog
    references.delete_row(there, name, key, dry_run=run.dry)
    out.print(f"{'Would delete' if run.dry else 'Deleted'} row {', '.join(key)} of {name}")


@app.command()
@takes("catalog", "dry-run", "yes")
def drop(run: Run, name: NameArgument) -> None:
    """Drop a reference table that no table refers to, on all nodes."""
    from shardids.tables import references, views

    run.ask(f"Drop reference table {name} on all nodes?")
    there = run.catalog
    references.drop_table(there, name, dry_run=run.dry)
    print_warnings(() if run.dry else views.follow(there))
    out.print(f"{'Would drop' if run.dry else 'Dropped'} reference table {name}")


@app.command()
@takes("catalog", "dry-run")
def move(
    run: Run, to: Annotated[str, typer.Option(metavar="NODE", help="The new writer of reference tables.")]
) -> None:
    """Let reference tables be written to on another node; run again, complete an interrupted call."""
    from shardids.tables import references, views

    there = run.catalog
    before = references.move_writer(there, to, dry_run=run.dry)
    print_warnings(() if run.dry else views.follow(there))
    would = "would be" if run.dry else "are"
    out.print(f'Reference tables {would} written to on node "{to}", before on "{before}"')


@app.command()
@takes("catalog", "dry-run")
def repair(run: Run) -> None:
    """Bring nodes that don't follow, or whose rows differ, to the writer's rows, and let them follow."""
    from shardids.catalog.references import references_of
    from shardids.tables import references

    there = run.catalog
    done = references.repair(there, dry_run=run.dry)
    has_writer = references_of(there).writer is not None
    for one in done:
        if not one.error:
            what = "would be repaired" if run.dry else "repaired"
            out.print(f'Node "{one.node}" {what}: {one.wrong}')
    failed = [one for one in done if one.error]
    for one in failed:
        print_error(f'node "{one.node}" is not repaired: {one.error}', one.hint)
    if failed:
        raise typer.Exit(1)
    if not done:
        out.print("All nodes follow the writer, with the same rows" if has_writer else _EMPTY)
