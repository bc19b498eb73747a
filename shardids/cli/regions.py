"""``shardids region``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, takes
from shardids.cli.printing import err, out, print_json, print_rows, print_warnings
from shardids.errors import BadArgument
from shardids.pg.notation import named_nodes, named_shards, parse_shards

if TYPE_CHECKING:
    from shardids.catalog.regions import Region
    from shardids.catalog.topology import Placement

app = typer.Typer(
    help="Names for ranges of shards, which live only on nodes of their region.", no_args_is_help=True
)


@app.command("create")
@takes("catalog", "dry-run")
def create(
    run: Run,
    name: Annotated[str, typer.Argument(help="A letter, then letters, digits, _ - . (40 at most)")],
    shards: Annotated[str, typer.Option(metavar="RANGE", help="Its shards, for good: 0-1023.")],
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node to assign to it; repeatable.")
    ] = None,
) -> None:
    """Name a range of shards. Idempotent. Shards that are elsewhere stay there until "rebalance"."""
    from shardids.catalog import region_changes
    from shardids.catalog.regions import Region
    from shardids.tables import views

    there = run.catalog
    numbers = parse_shards(shards, there.describe().shard_count)
    if len(numbers) != numbers[-1] - numbers[0] + 1:
        raise BadArgument(
            f"{shards!r} is not one range of shards",
            hint="A region is one range. Make several regions, eu-1 and eu-2, of several.",
        )
    region = Region(name=name, first_shard=numbers[0], last_shard=numbers[-1])
    after = region_changes.create_region(there, region, node or (), dry_run=run.dry)
    stale_views = () if run.dry else views.follow(there)
    out.print(f'{"Would create" if run.dry else "Created"} region "{name}" of {named_shards(numbers)}')
    _print_nodes(after, name)
    _print_outside(after)
    print_warnings(stale_views)


@app.command("assign")
@takes("catalog", "dry-run")
def assign(
    run: Run,
    names: Annotated[
        list[str], typer.Argument(metavar="[REGION] NODE...", help="The region, then its nodes.")
    ],
    none: Annotated[
        bool, typer.Option("--none", help="Name no region: the nodes take shards of no region.")
    ] = False,
) -> None:
    """Let nodes take the shards of a region and no others. Their shards stay until "rebalance"."""
    from shardids.catalog import region_changes

    name, nodes = (None, names) if none else (names[0], names[1:])
    if not nodes:
        raise BadArgument("which nodes?", hint=f"For example: shardids region assign {name} NODE")
    before = run.catalog.placement()
    after = region_changes.assign_nodes(run.catalog, name, nodes, dry_run=run.dry)
    if name is None:
        out.print(f"{'Would release' if run.dry else 'Released'} {named_nodes(nodes)}")
    else:
        out.print(f'{"Would assign" if run.dry else "Assigned"} {named_nodes(nodes)} to region "{name}"')
    _print_left(before, nodes, name)
    _print_outside(after)


@app.command("list")
@takes("catalog", "json")
def list_regions(
    run: Run,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[REGION]", help="Show only this region, with the number of shards per node."),
    ] = None,
) -> None:
    """List the regions, their shards and nodes, and how many of the shards live elsewhere."""
    from shardids.catalog.regions import existing_region

    placement = run.catalog.placement()
    if name is None:
        rows = [_row(region, placement) for region in placement.regions.values()]
        if not run.as_json:
            rows = [row | {"nodes": ", ".join(map(str, row["nodes"]))} for row in rows]  # type: ignore[call-overload]  # a list
        run.print_rows(rows, empty="No region yet. To make one: shardids region create eu --shards 0-31")
        return
    region = existing_region(name, placement.regions)
    held = Counter(node for shard, node in placement.owners().items() if shard in region.shards)
    names = sorted({*placement.nodes_of_region(name), *held})
    rows = [{"node": node, "region": placement.nodes[node].region, "shards": held[node]} for node in names]
    elsewhere = [shard for shard in placement.outside() if shard in region.shards]
    if run.as_json:
        print_json(_row(region, placement) | {"held": rows, "elsewhere": elsewhere})
        return
    out.print(f'Region "{name}" of {named_shards(region.shards)}')
    print_rows(rows, empty=f"It has no node yet: shardids region assign {name} NODE")
    if elsewhere:
        out.print(f"{named_shards(elsewhere)} elsewhere. To bring them home: shardids rebalance")


@app.command("drop")
@takes("catalog", "dry-run", "yes")
def drop(run: Run, name: str) -> None:
    """Forget a region. Its shards and nodes belong to none; no row is touched."""
    from shardids.catalog import region_changes
    from shardids.catalog.regions import existing_region
    from shardids.tables import views

    there = run.catalog
    region = existing_region(name, there.placement().regions)
    if not run.dry:
        run.ask(
            f'Forget region "{name}" of {named_shards(region.shards)}? Applications that name it are'
            " refused from then on. One of that name with other shards would look for keys elsewhere."
        )
    after = region_changes.drop_region(there, name, dry_run=run.dry)
    stale_views = () if run.dry else views.follow(there)
    out.print(f'{"Would drop" if run.dry else "Dropped"} region "{name}"')
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
        out.print(f"Its shards go to {named_nodes(names)}")


def _print_left(before: Placement, nodes: Iterable[str], region: str | None) -> None:
    """Print which regions the nodes were of, and are no more."""
    for name in sorted(set(nodes)):
        if name in before.nodes and (left := before.nodes[name].region) not in (None, region):
            err.print(f'Node "{name}" was of region "{left}"')


def _print_outside(after: Placement) -> None:
    from shardids.catalog.regions import without_node

    bereft = without_node(after)
    for region, shards in bereft.items():
        where = f"; {named_shards(shards)} stay where they are" if shards else ""
        if region is None:
            err.print(
                f"No node is without a region{where}. To make one so: shardids region assign --none NODE,"
                " or shardids node add NAME --url URL"
            )
        else:
            err.print(
                f'Region "{region}" has no node{where}. To assign one: shardids region assign {region} NODE,'
                f" or shardids node add NAME --url URL --region {region}"
            )
    if outside := [shard for shard in after.outside() if after.region_of(shard) not in bereft]:
        if any(bereft.values()):
            err.print("Until every region has a node, rebalance moves nothing.")
        live = "lives" if len(outside) == 1 else "live"
        err.print(
            f"{named_shards(outside)} {live} on nodes outside of their region."
            " To bring them home: shardids rebalance"
        )
