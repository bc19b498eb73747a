"""``shardids lookup``: manages columns that are unique over all shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from shardids.cli.command import Run, takes
from shardids.cli.printing import bars, out
from shardids.pg.notation import counted

app = typer.Typer(
    help="Columns that are unique over all shards, and find a row's shard.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="TABLE.COLUMN", help="The column, as in every shard.")]


@app.command()
@takes("catalog", "dry-run")
def create(run: Run, name: NameArgument) -> None:
    """Make the place where a column's values are claimed; of empty tables, it is ready. Idempotent.

    Grants follow those of the table.
    """
    from shardids.tables import lookups

    there = run.catalog
    made = lookups.create(there, name, dry_run=run.dry)
    out.print(f"{name}: claims {'would be' if run.dry else 'are'} made in {counted(len(made), 'shard')}")
    if not run.dry and lookups.backfill_if_empty(there, name):
        out.print(f"{name}: rows can be looked up, and statements that claim nothing are refused")
        return
    out.print(f"When all applications have the model with lookup_key(): shardids lookup backfill {name}")


@app.command("list")
@takes("catalog", "json")
def list_lookups(run: Run) -> None:
    """List the look-ups, and whether rows can be looked up by them."""
    from shardids.tables import lookups

    there = run.catalog
    rows = lookups.listed(there)
    run.print_rows(rows, empty="There are no look-ups yet.")


@app.command()
@takes("catalog", "dry-run")
def backfill(run: Run, name: NameArgument) -> None:
    """Claim the values of rows without a claim; from then on, statements that claim nothing are refused."""
    from shardids.tables import lookups

    there = run.catalog
    with _progress("claiming values") as on_progress:
        done = lookups.backfill(there, name, dry_run=run.dry, on_progress=on_progress)
    said = "have no claim" if run.dry else "were claimed"
    out.print(
        f"{name}: {done.claimed:,} of {counted(done.rows, 'row')} in {counted(done.shards, 'shard')} {said}"
    )


@app.command()
@takes("catalog", "dry-run")
def sweep(run: Run, name: NameArgument) -> None:
    """Delete the claims of rows that were deleted, got another value or never came."""
    from shardids.tables import lookups

    there = run.catalog
    with _progress("reading claims") as on_progress:
        done = lookups.sweep(there, name, dry_run=run.dry, on_progress=on_progress)
    said = "have no row" if run.dry else "had no row and were deleted"
    out.print(f"{name}: {done.given_up:,} of {done.claims:,} claims {said}")
    if done.busy:
        out.print(f"{done.busy:,} more may still get one: sweep again later")


@app.command()
@takes("catalog", "dry-run", "yes")
def drop(run: Run, name: NameArgument) -> None:
    """Drop a look-up and its claims: values can then come twice. Models that still have it can't write."""
    from shardids.tables import lookups

    there = run.catalog
    if not run.dry:
        lookups.drop(there, name, dry_run=True)
        run.ask(f"Drop look-up {name}, with all claims?")
    dropped = lookups.drop(there, name, dry_run=run.dry)
    out.print(
        f"{name}: claims {'would be' if run.dry else 'are'} dropped in {counted(len(dropped), 'shard')}"
    )


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    with bars("{task.description}", "bar", "count", "left") as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
