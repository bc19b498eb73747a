"""``shardids init`` and ``grant``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from shardids.catalog.notation import parse_shards
from shardids.catalog.rows import SCHEMA_PREFIX
from shardids.cli.common import LAYOUTS, CatalogOption, DryRunOption, opened
from shardids.cli.output import err, out
from shardids.ids.layout import Layout
from shardids.install import provision

_FEW_YEARS = 10
"""``init`` warns of a layout that ends in fewer years."""


def init(
    catalog: CatalogOption,
    shards: Annotated[int, typer.Option(help="Number of logical shards; fixed for good.")] = 1024,
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME|T-S-Q[@EPOCH_MS]",
            help=f"{LAYOUTS}; fixed for good.",
        ),
    ] = "default",
    schema_prefix: Annotated[
        str, typer.Option(help="What schema names of shards start with.")
    ] = SCHEMA_PREFIX,
    dry_run: DryRunOption = False,
) -> None:
    """Create the catalog of a new cluster. Idempotent."""
    chosen = Layout.parse(layout)
    with opened(catalog) as there:
        description = provision.init(there, chosen, shards, schema_prefix, dry_run=dry_run)
    if chosen.negative_from is not None:
        err.print(
            f"[yellow]Warning:[/] layout {chosen.name} uses the sign bit: from"
            f" {chosen.negative_from:%Y-%m-%d} on its IDs are negative and sort before the older ones."
        )
    done = "Would make" if dry_run else "Made"
    out.print(f"{done} cluster {description.cluster}: {shards} shards, layout {chosen}")
    years = chosen.years_left(datetime.now(UTC))
    out.print(f"  time     until {chosen.last_time:%Y-%m-%d}, {years:.1f} years left")
    each = chosen.ids_per_second
    out.print(f"  IDs      {each:,} a second in each shard, {each * shards:,} in all")
    out.print(f"  shards   {shards:,} of {chosen.shard_limit:,} that the layout has room for")
    if years < _FEW_YEARS:
        err.print(
            f"[yellow]Warning:[/] layout {chosen} ends on {chosen.last_time:%Y-%m-%d}: from then on no shard"
            " issues IDs. A layout is fixed for good."
        )


def grant(
    role: Annotated[str, typer.Argument(help="A role that exists on the nodes.")],
    catalog: CatalogOption,
    shards: Annotated[str, typer.Option(help="Numbers and ranges, 0-31,40, or all.")] = "all",
    dry_run: DryRunOption = False,
) -> None:
    """Let an application role draw IDs: draw, reserve and decode, nothing else."""
    with opened(catalog) as there:
        numbers = None if shards == "all" else parse_shards(shards, there.describe().shard_count)
        count = provision.grant(there, role, numbers, dry_run=dry_run)
    out.print(f'{"Would grant" if dry_run else "Granted"} use of {count} shards to "{role}"')
