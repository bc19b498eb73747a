"""``shardids shard create``, ``list`` and ``show``."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardids import views
from shardids.catalog.notation import parse_shards
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import schema_name
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened
from shardids.cli.output import err, out, print_rows, print_warnings
from shardids.install import provision
from shardids.install.inspecting import inspect_shard
from shardids.migrate.environment import Environment
from shardids.migrate.new_shards import MigrateNew, migrator_of_new_shards


def create_shards(
    catalog: CatalogOption,
    shards: Annotated[str, typer.Argument(help="Numbers and ranges, 0-31,40, or all.")] = "all",
    node: Annotated[
        str | None, typer.Option(help="Node for those without a place; else they are spread evenly.")
    ] = None,
    migrations: Annotated[
        Path | None,
        typer.Option(
            envvar="SHARDIDS_MIGRATIONS",
            metavar="DIR",
            help="The application's migrations: new shards get its tables, at the other shards' revision.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Create shards on their nodes. Idempotent: creates what is missing."""
    environment = None if migrations is None else Environment.at(migrations)
    with opened(catalog) as there:
        numbers = parse_shards(shards, there.describe().shard_count)
        if dry_run:
            made = there.plan_shards(numbers, node, dry_run=True)
        else:
            with ExitStack() as stack:
                migrate: MigrateNew | None = None
                if environment is not None:
                    migrate = stack.enter_context(migrator_of_new_shards(there, environment))
                made = _create_with_progress(there, numbers, node, migrate)
            if made:
                print_warnings(views.follow(there))
    done = "Would make" if dry_run else "Made"
    for name, count in sorted(Counter(made.values()).items()):
        out.print(f'{done} {count} shards on node "{name}"')
    if not made:
        out.print("Nothing to do: the shards exist")


def _create_with_progress(
    there: Catalog, shards: list[int], node: str | None, migrate: MigrateNew | None
) -> dict[int, str]:
    columns = (
        TextColumn("node {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
        tasks = {}

        def plan(counts: dict[str, int]) -> None:
            for name, count in sorted(counts.items()):
                tasks[name] = progress.add_task(name, total=count)

        return provision.create_shards(
            there,
            shards,
            node=node,
            migrate=migrate or (lambda _node, _shards: None),
            on_plan=plan,
            on_progress=lambda name, count: progress.advance(tasks[name], count),
        )


def list_shards(
    catalog: CatalogOption,
    node: Annotated[str | None, typer.Option(help="Only those on this node.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which node holds which shard."""
    with opened(catalog) as there:
        placement, prefix = there.placement(), there.describe().schema_prefix
    if node is not None and node not in placement.nodes:
        raise unknown_node(node, placement.nodes)
    rows = [
        {
            "shard": shard,
            "node": name,
            "region": placement.region_of(shard),
            "schema": schema_name(prefix, shard),
            "state": "lost" if shard in placement.lost else "active",
        }
        for shard, name in sorted(placement.owners().items())
        if node in (None, name)
    ]
    print_rows(rows, as_json=as_json, empty="No shard yet. To make them: shardids shard create")


def show_shard(shard: int, catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """Show what the catalog and the owner node know of a shard."""
    with opened(catalog) as there:
        (number,) = parse_shards(str(shard), there.describe().shard_count)
        facts = inspect_shard(there, number)
    if as_json:
        print_rows([facts], as_json=True, empty="")
        return
    for name, value in facts.items():
        out.print(f"{name:>16}  {value}", markup=False)
