"""``shardids adopt table``: one table's key becomes a bigint that a shard issues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardids import views
from shardids.cli.common import (
    CatalogOption,
    DryRunOption,
    JsonOption,
    YesOption,
    confirm,
    opened,
    print_json,
)
from shardids.cli.output import err, out, print_warnings
from shardids.errors import BadArgument

if TYPE_CHECKING:
    from shardids.inplace.keys import Status
    from shardids.inplace.swapping import How


def table(
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table, with its schema: public.orders")],
    catalog: CatalogOption,
    shard: Annotated[int, typer.Option(min=0, help="The shard, which lives in the same database.")],
    show: Annotated[bool, typer.Option("--status", help="Show how far it is; change nothing.")] = False,
    back: Annotated[bool, typer.Option("--back", help="Make the table what it was.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Draw IDs from the shard, and drop the old columns.")
    ] = False,
    batch: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="About how many rows to fill in a transaction.")
    ] = 2000,
    pause: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait between two of them.")
    ] = 0.0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Widen one table's integer key, and what refers to it, to bigint, while applications use it.

    The new columns stand beside the old ones, are filled, indexed and referred to, and take their names in
    one short transaction. IDs come from the old sequence until --finish. A key that is bigint already only
    gets next_id() as its default. Run again, it goes on where it was interrupted.
    """
    from shardids.inplace import keys

    if show + back + finish > 1:
        raise BadArgument("--status, --back and --finish exclude each other")
    with opened(catalog) as there, _shown(batch, pause) as how:
        if show:
            done = keys.status(there, name, shard)
        elif back:
            done = keys.take_back(there, name, shard, how, dry_run=dry_run)
        elif finish:
            confirm("Drop the old columns, for good?", yes=yes or dry_run)
            done = keys.finish(there, name, shard, how, dry_run=dry_run)
        else:
            done = keys.change_key(there, name, shard, how, dry_run=dry_run)
        print_warnings(() if dry_run or show else views.follow(there))
    if as_json:
        print_json(asdict(done))
    else:
        _print(done, is_done=back or finish, dry_run=dry_run)


def _print(done: Status, *, is_done: bool, dry_run: bool) -> None:
    columns = ", ".join(done.columns)
    match done.state:
        case None if done.columns and not is_done:
            text = f"No obstacles found: {columns}; nothing was changed"
        case None:
            text = f"{done.table}: nothing is under way"
        case "swapped":
            text = f"{columns}: bigint. IDs come from the sequence until --finish; --back is open until then"
        case "drawing":
            text = (
                f"{columns} was bigint already, and draws from shard {done.shard}; next: --back or --finish"
            )
        case _:
            text = f"{done.table}: {done.state}"
    out.print(text, markup=False)
    for table_name, share in done.filled.items():
        out.print(f"{table_name}: {share:.0%} filled", markup=False)
    if dry_run and done.state:
        out.print("Nothing was changed")


@contextmanager
def _shown(batch: int, pause: float) -> Iterator[How]:
    """Shows the work: by a bar on a terminal, otherwise by a line for each step."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from shardids.inplace.swapping import How

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)

        def say(text: str) -> None:
            err.print(text, markup=False)

        def step(text: str) -> None:
            progress.update(task, description=text, total=None)
            if not err.is_terminal:
                say(text)

        yield How(
            batch=batch,
            pause_s=pause,
            on_step=step,
            on_rows=lambda name, share: progress.update(
                task, description=f"fill {name}", total=1.0, completed=share
            ),
            on_wait=say,
        )
