"""``shardids region``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import typer

from shardids import views
from shardids.catalog import region_changes
from shardids.catalog.notation import named_nodes, named_shards, parse_shards
from shardids.catalog.regions import Region, existing_region, without_node
from shardids.catalog.topology import Placement
from shardids.cli.common import (
    CatalogOption,
    DryRunOption,
    JsonOption,
    YesOption,
    confirm,
    opened,
    print_json,
)
from shardids.cli.output import err, out, print_rows, print_warnings
from shardids.errors import BadArgument

app = typer.Typer(
    help="Names for ranges of shards, which live on nodes of their region alone.", no_args_is_help=True
)

NodesArgument = Annotated[list[str], typer.Argument(metavar="NODE...", help="The nodes' names.")]


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="A letter, then letters, digits, _ - . (40 at most)")],
    shards: Annotated[str, typer.Option(metavar="RANGE", help="Its shards, for good: 0-1023.")],
    catalog: CatalogOption,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node to assign to it; repeatable.")
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Name a range of shards. Idempotent. Shards that are elsewhere stay there until "rebalance"."""
    with opened(catalog) as there:
        numbers = parse_shards(shards, there.describe().shard_count)
        if len(numbers) != numbers[-1] - numbers[0] + 1:
            raise BadArgument(
                f"{shards!r} is not one range of shards",
                hint="A region is one range. Make several regions, eu-1 and eu-2, of several.",
            )
        region = Region(name=name, first_shard=numbers[0], last_shard=numbers[-1])
        after = region_changes.create_region(there, region, node or (), dry_run=dry_run)
        stale_views = () if dry_run else views.follow(there)
    out.print(
        f'{"Would create" if dry_run else "Created"} region "{name}" of {named_shards(numbers)}', markup=False
    )
    _print_nodes(after, name)
    _print_outside(after)
    print_warnings(stale_views)


@app.command("assign")
def assign(name: str, nodes: NodesArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Let nodes take the shards of a region and no others. What they hold stays until "rebalance"."""
    with opened(catalog) as there:
        before = there.placement()
        after = region_changes.assign_nodes(there, name, nodes, dry_run=dry_run)
    done = "Would assign" if dry_run else "Assigned"
    out.print(f'{done} {named_nodes(nodes)} to region "{name}"', markup=False)
    _print_left(before, nodes, name)
    _print_outside(after)


@app.command("release")
def release(nodes: NodesArgument, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Let nodes take the shards of no region. What they hold stays until "rebalance"."""
    with opened(catalog) as there:
        before = there.placement()
        after = region_changes.assign_nodes(there, None, nodes, dry_run=dry_run)
    out.print(f"{'Would release' if dry_run else 'Released'} {named_nodes(nodes)}", markup=False)
    _print_left(before, nodes, None)
    _print_outside(after)


@app.command("list")
def list_regions(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the regions, their shards and nodes, and how many of the shards live elsewhere."""
    with opened(catalog) as there:
        placement = there.placement()
    rows = [_row(region, placement) for region in placement.regions.values()]
    if not as_json:
        rows = [row | {"nodes": ", ".join(map(str, row["nodes"]))} for row in rows]  # type: ignore[call-overload]  # a list
    print_rows(
        rows, as_json=as_json, empty="No region yet. To make one: shardids region create eu --shards 0-31"
    )


@app.command("show")
def show(name: str, catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """Show a region: its nodes, and how many of its shards each node holds."""
    with opened(catalog) as there:
        placement = there.placement()
    region = existing_region(name, placement.regions)
    held = Counter(node for shard, node in placement.owners().items() if shard in region.shards)
    names = sorted({*placement.nodes_of_region(name), *held})
    rows = [{"node": node, "region": placement.nodes[node].region, "shards": held[node]} for node in names]
    elsewhere = [shard for shard in placement.outside() if shard in region.shards]
    if as_json:
        print_json(_row(region, placement) | {"held": rows, "elsewhere": elsewhere})
        return
    out.print(f'Region "{name}" of {named_shards(region.shards)}', markup=False)
    print_rows(rows, as_json=False, empty=f"It has no node yet: shardids region assign {name} NODE")
    if elsewhere:
        out.print(f"{named_shards(elsewhere)} elsewhere. To bring them home: shardids rebalance")


@app.command("drop")
def drop(name: str, catalog: CatalogOption, dry_run: DryRunOption = False, yes: YesOption = False) -> None:
    """Forget a region. Its shards and nodes belong to none; no row is touched."""
    with opened(catalog) as there:
        region = existing_region(name, there.placement().regions)
        if not dry_run:
            confirm(
                f'Forget region "{name}" of {named_shards(region.shards)}? Applications that name it are'
                " refused from then on. One of that name with other shards would look for keys elsewhere.",
                yes=yes,
            )
        after = region_changes.drop_region(there, name, dry_run=dry_run)
        stale_views = () if dry_run else views.follow(there)
    out.print(f'{"Would drop" if dry_run else "Dropped"} region "{name}"', markup=False)
    _print_outside(after)
    print_warnings(stale_views)


def _row(region: Region, placement: Placement) -> dict[str, object]:
    return {
        "region": region.name,
        "first": region.first_shard,
        "last": region.last_shard,
        "nodes": placement.nodes_of_region(region.name),
        "elsewhere": sum(shard in region.shards for shard in placement.outside()),
    }


def _print_nodes(after: Placement, region: str) -> None:
    if names := after.nodes_of_region(region):
        out.print(f"Its shards go to {named_nodes(names)}", markup=False)


def _print_left(before: Placement, nodes: Iterable[str], region: str | None) -> None:
    """Prints which regions the nodes were of, and are no more."""
    for name in sorted(set(nodes)):
        if name in before.nodes and (left := before.nodes[name].region) not in (None, region):
            err.print(f'Node "{name}" was of region "{left}"', markup=False)


def _print_outside(after: Placement) -> None:
    bereft = without_node(after)
    for region, shards in bereft.items():
        where = f"; {named_shards(shards)} stay where they are" if shards else ""
        if region is None:
            err.print(
                f"No node is without a region{where}. To let one have none: shardids region release NODE,"
                " or shardids node add NAME --url URL",
                markup=False,
            )
        else:
            err.print(
                f'Region "{region}" has no node{where}. To assign one: shardids region assign {region} NODE,'
                f" or shardids node add NAME --url URL --region {region}",
                markup=False,
            )
    if outside := [shard for shard in after.outside() if after.region_of(shard) not in bereft]:
        if any(bereft.values()):
            err.print("Until every region has a node, rebalance moves nothing.")
        live = "lives" if len(outside) == 1 else "live"
        err.print(
            f"{named_shards(outside)} {live} on nodes outside of their region."
            " To bring them home: shardids rebalance",
            markup=False,
        )
