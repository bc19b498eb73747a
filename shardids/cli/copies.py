"""The commands of ``shardids shard`` that decide between copies of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from shardids.cli.command import OnBusyOption, Run, takes
from shardids.cli.printing import err, print_warnings
from shardids.errors import BadArgument, ShardidsError
from shardids.pg.notation import named_shards, parse_shards

ShardsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SHARD", help="Numbers and ranges, 0-31,40, or all.")
]


def print_left(lines: Sequence[str]) -> None:
    """Print why shards were left out; the command then end with 1."""
    for line in lines:
        err.print(line)
    if lines:
        err.print(f"{len(lines)} left. To try again, run the command again.")
        raise typer.Exit(1)


@takes("catalog", "dry-run", "yes", "json")
def activate_shards(
    run: Run,
    shards: ShardsArgument = None,
    above_tick: Annotated[
        int | None, typer.Option(help="Issue IDs above this tick: what fence returned on the original.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="The database that is to take the place of the shards' node: a copy of it."),
    ] = None,
) -> None:
    """Let shards issue IDs on their node, once they are found to be active on no other."""
    from shardids import mover

    if not shards:
        raise BadArgument("which shards?", hint="For example: shardids shard activate 5")
    there = run.catalog
    numbers = parse_shards(",".join(shards), there.shard_total())
    found = [mover.activate(there, shard, above_tick=above_tick, url=url, dry_run=True) for shard in numbers]
    if copied := [one.shard for one in found if one.before == "copy"]:
        run.ask(
            f"{named_shards(copied).capitalize()}: copied from another server. If that ever issues IDs again,"
            " some will be issued twice. Activate the copy?"
        )
    if not run.dry:
        found = [mover.activate(there, shard, above_tick=above_tick, url=url) for shard in numbers]
    run.print_rows([asdict(one) for one in found])


@takes("catalog", "dry-run", "json")
def place_shards(
    run: Run,
    node: Annotated[str, typer.Option(help="The node where they are active.")],
    shards: ShardsArgument = None,
) -> None:
    """Correct the catalog: shards are active on another node than it says, and on no other."""
    from shardids import mover
    from shardids.tables import views

    if not shards:
        raise BadArgument("which shards?", hint="For example: shardids shard place 5 --node b")
    there = run.catalog
    numbers = parse_shards(",".join(shards), there.shard_total())
    found = [mover.place(there, shard, node, dry_run=True) for shard in numbers]
    if not run.dry:
        found = [mover.place(there, shard, node) for shard in numbers]
        print_warnings(views.follow(there))
    run.print_rows([asdict(one) for one in found])


@takes("catalog", "dry-run", "yes", "json")
def purge_shards(
    run: Run,
    shards: ShardsArgument = None,
    node: Annotated[
        str | None,
        typer.Option(help="Only on this node; also schemas with a shard's name that are none of its shards."),
    ] = None,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Drop the old copies of these shards: those that moves left.

    With --node, "unknown" are schemas there that have a shard's name and are none of the node's shards.
    """
    from shardids import mover
    from shardids.catalog.leases import OnBusy
    from shardids.tables import views

    there = run.catalog
    if not shards:
        raise BadArgument("which shards?", hint="For example: shardids shard purge 5, or all")
    numbers = parse_shards(
        ",".join(shards), there.shard_total() if node is None else 1 << there.describe().layout.shard_bits
    )
    busy = dict[str, None]()

    def skip(error: ShardidsError) -> None:
        busy[error.in_a_line()] = None

    copies = mover.purge(there, numbers, node=node, on_busy=OnBusy(on_busy), on_skip=skip, dry_run=True)
    if copies and not run.dry:
        named = named_shards({copy.shard for copy in copies})
        where = "" if node is None else f' on node "{node}"'
        run.ask(f"Drop the old copies of {named}{where}, with all their rows?")
        # A view that still reads an old copy would fail once the copy is dropped.
        print_warnings(views.follow(there))
        copies = mover.purge(there, numbers, node=node, on_busy=OnBusy(on_busy), on_skip=skip)
    empty = "Nothing was dropped" if busy else "No old copy is left"
    rows = [
        {
            "shard": copy.shard,
            "node": copy.node,
            "size_bytes": copy.size_bytes,
            "schema": "old copy" if copy.is_known else "unknown",
        }
        for copy in copies
    ]
    run.print_rows(rows, empty=empty)
    print_left(list(busy))
