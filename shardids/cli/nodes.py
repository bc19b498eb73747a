"""``shardids node``."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from shardids import references, views
from shardids.catalog.nodes import Nodes
from shardids.catalog.notation import parse_shards, shown_shards
from shardids.catalog.regions import in_region
from shardids.catalog.topology import Node, Placement
from shardids.cli import moves
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.output import err, out, print_rows, print_warnings
from shardids.cli.query_node import StorePasswordOption
from shardids.errors import BadArgument
from shardids.migrate.environment import Environment
from shardids.migrate.node_revisions import require_migrated
from shardids.mover import failover
from shardids.mover.losses import LostShard


def add_node(
    name: Annotated[str, typer.Argument(help="A letter, then letters, digits, _ - . (40 at most)")],
    url: Annotated[str, typer.Option(help="Its database; a password in it is used now but not kept.")],
    catalog: CatalogOption,
    migrations: Annotated[
        Path | None,
        typer.Option(
            envvar="SHARDIDS_MIGRATIONS",
            metavar="DIR",
            help="The application's migrations: its revisions for the node run there.",
        ),
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="The region whose shards it takes; else it takes those of none.")
    ] = None,
    query_node: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With the first node: the database that is to be the query node; else that is the node.",
        ),
    ] = None,
    store_password: StorePasswordOption = False,
    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="Move shards to it until all nodes carry about the same.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Install the engine in a database and register it as a node. Idempotent."""
    environment = None if migrations is None else Environment.at(migrations)
    with opened(catalog) as there:

        def migrate() -> None:
            if environment is not None:
                with Nodes({name: Node(name=name, url=url)}, there.url, autocommit=True) as nodes:
                    require_migrated(environment, name, nodes[name])

        is_first = not there.nodes()
        if query_node is not None and not is_first:
            raise BadArgument(
                "--query-node goes with the first node",
                hint="Later: shardids query-node create --url URL",
            )
        references.add_node(there, name, url, region=region, migrate=migrate, dry_run=dry_run)
        warnings: tuple[str, ...] = ()
        if is_first and not dry_run:
            where = {"node": name} if query_node is None else {"url": query_node}
            warnings = views.found_query_node(there, **where, store_password=store_password)
        elif not dry_run:
            warnings = views.follow(there, store_password=store_password)
    print_warnings(warnings)
    out.print(f'{"Would add" if dry_run else "Added"} node "{name}"')
    if rebalance and not dry_run:
        moves.rebalance(catalog)


def list_nodes(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the nodes, their regions, and how many shards each holds."""
    with opened(catalog) as there:
        placement = there.placement()
    held = Counter(placement.node_of.values())
    rows = [
        {"node": node.name, "region": node.region, "shards": held[node.name], "url": node.url}
        for node in placement.nodes.values()
    ]
    print_rows(rows, as_json=as_json, empty="No node yet. To add one: shardids node add NAME --url URL")


def remove_node(name: str, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Remove the engine from a node that holds no shards, and the node from the catalog."""
    with opened(catalog) as there:
        references.remove_node(there, name, dry_run=dry_run)
        warnings = () if dry_run else views.follow(there)
    print_warnings(warnings)
    out.print(f'{"Would remove" if dry_run else "Removed"} node "{name}"')


def replace_node(
    name: str,
    url: Annotated[str, typer.Option(help="The server that took over; a password in it is not kept.")],
    catalog: CatalogOption,
    accept_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARDS",
            help="Lost shards that get a home again: their newest copy, or an empty shard if there is none.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --accept-loss: give up what is in no copy.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Point a node that was lost at its promoted standby.

    Shards that the standby lacks count as lost: nobody is sent to them until --accept-loss. Exits 3 if
    any is left. Repeat it to see them again, or to resume it.
    """
    if accept_loss is not None and not (yes or dry_run):
        raise BadArgument(
            "--accept-loss gives up what was written to the shards since their newest copy",
            hint="To see what is left of them: --dry-run. To go on: --yes",
        )
    with opened(catalog) as there:
        accepted = [] if accept_loss is None else parse_shards(accept_loss, there.describe().shard_count)
        done, left = references.replace_node(there, name, url, accept_loss=accepted, dry_run=dry_run)
        outside = _homes_outside(done, there.placement())
    if as_json:
        print_json(_replacement_row(done))
    else:
        _print_replacement(done, dry_run=dry_run)
    print_warnings(outside)
    print_warnings(done.stale_views)
    print_warnings(left)
    if done.lost:
        raise typer.Exit(3)


def _replacement_row(done: failover.Replacement) -> dict[str, object]:
    def row(lost: LostShard) -> dict[str, object]:
        return {
            "shard": lost.shard,
            "reason": lost.reason,
            "home": lost.copy.node if lost.copy else None,
            "left": lost.what_is_left(),
        }

    return {
        "node": done.node,
        "url": done.url,
        "shards": done.shards,
        "fenced": done.fenced,
        "stopped": done.stopped,
        "lost": [row(lost) for lost in done.lost],
        "accepted": [row(lost) for lost in done.accepted],
        "set_aside": done.set_aside,
    }


def _homes_outside(done: failover.Replacement, placement: Placement) -> list[str]:
    """Lost shards whose home is on a node of another region: nobody else has their rows, if they have any."""
    homes = {one.shard: placement.nodes[one.home] for one in (*done.accepted, *done.lost)}
    return [
        f'shard {shard} is {in_region(placement.region_of(shard))}, and node "{home.name}", its home, is'
        f" {in_region(home.region)}. To bring it to a node of its own: shardids rebalance"
        for shard, home in homes.items()
        if home.region != placement.region_of(shard)
    ]


def _print_replacement(done: failover.Replacement, *, dry_run: bool) -> None:
    would = "would be" if dry_run else "is"
    out.print(f'Node "{done.node}" {would} at {done.url}, with {done.shards} shards', markup=False)
    for lost in done.accepted:
        out.print(
            f'Shard {lost.shard} {would} on node "{lost.home}": {lost.reason}; {lost.what_is_left()}.'
            " What was written to it later is given up.",
            markup=False,
        )
    for lost in done.lost:
        out.print(f"Shard {lost.shard} {would} lost: {lost.reason}; {lost.what_is_left()}.", markup=False)
    for shard in done.fenced:
        fenced = f"{'Would fence' if dry_run else 'Fenced'} shard {shard} there"
        err.print(f"{fenced}: it had moved away, and the standby had not heard of it")
    for shard in done.stopped:
        err.print(f"Shard {shard} is fenced there. To let it issue IDs: select shardids.activate({shard})")
    for schema in done.set_aside:
        err.print(f"An incomplete copy was kept as schema {schema}: drop it when nobody needs its rows")
    if done.lost:
        shards = shown_shards(lost.shard for lost in done.lost)
        err.print(
            "No client is sent to a lost shard. To give it the home that is named here:"
            f" shardids node replace {done.node} --url {shlex.quote(done.url)} --accept-loss {shards} --yes",
            markup=False,
        )
