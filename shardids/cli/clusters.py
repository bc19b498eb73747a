"""``shardids init``, ``node``, ``shard`` and ``grant``."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardids import views
from shardids.catalog.nodes import Nodes
from shardids.catalog.notation import parse_shards, shown_shards
from shardids.catalog.rows import SCHEMA_PREFIX, Catalog, unknown_node
from shardids.catalog.topology import Node, schema_name
from shardids.cli import moves
from shardids.cli.common import LAYOUTS, CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.output import err, out, print_rows, print_warnings
from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.install import provision
from shardids.migrate.environment import Environment
from shardids.migrate.new_shards import MigrateNew, migrator_of_new_shards
from shardids.migrate.node_revisions import require_migrated
from shardids.mover import failover
from shardids.mover.losses import LostShard

_FEW_YEARS = 10
"""``init`` warns of a layout that ends in fewer years."""

node_app = typer.Typer(help="The PostgreSQL databases that hold shards.", no_args_is_help=True)
shard_app = typer.Typer(help="The logical shards.", no_args_is_help=True)


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


@node_app.command("add")
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
    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="Move shards to it until all nodes carry about the same.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Install the engine in a database and register it as a node. Idempotent."""
    environment = None if migrations is None else Environment.at(migrations)
    with opened(catalog) as there:
        provision.add_node(there, name, url, dry_run=dry_run)
        if environment is not None and not dry_run:
            with Nodes({name: Node(name=name, url=url)}, there.url, autocommit=True) as nodes:
                require_migrated(environment, name, nodes[name])
    out.print(f'{"Would add" if dry_run else "Added"} node "{name}"')
    if rebalance and not dry_run:
        moves.rebalance(catalog)


@node_app.command("list")
def list_nodes(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List the nodes, and how many shards each holds."""
    with opened(catalog) as there:
        placement = there.placement()
    held = Counter(placement.node_of.values())
    rows = [
        {"node": node.name, "shards": held[node.name], "url": node.url} for node in placement.nodes.values()
    ]
    print_rows(rows, as_json=as_json, empty="No node yet. To add one: shardids node add NAME --url URL")


@node_app.command("remove")
def remove_node(name: str, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Remove the engine from a node that holds no shards, and the node from the catalog."""
    with opened(catalog) as there:
        provision.remove_node(there, name, dry_run=dry_run)
    out.print(f'{"Would remove" if dry_run else "Removed"} node "{name}"')


@node_app.command("replace")
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
        done = failover.replace_node(there, name, url, accept_loss=accepted, dry_run=dry_run)
    if as_json:
        print_json(_replacement_row(done))
    else:
        _print_replacement(done, dry_run=dry_run)
    print_warnings(done.stale_views)
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


@shard_app.command("create")
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
                print_warnings(views.follow_tables(there))
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


@shard_app.command("list")
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
            "schema": schema_name(prefix, shard),
            "state": "lost" if shard in placement.lost else "active",
        }
        for shard, name in sorted(placement.owners().items())
        if node in (None, name)
    ]
    print_rows(rows, as_json=as_json, empty="No shard yet. To make them: shardids shard create")


@shard_app.command("show")
def show_shard(shard: int, catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """Show what the catalog and the owner node know of a shard."""
    with opened(catalog) as there:
        (number,) = parse_shards(str(shard), there.describe().shard_count)
        facts = provision.inspect_shard(there, number)
    if as_json:
        print_rows([facts], as_json=True, empty="")
        return
    for name, value in facts.items():
        out.print(f"{name:>16}  {value}", markup=False)


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


shard_app.command("move")(moves.move_shards)
shard_app.command("moves")(moves.list_moves)
shard_app.command("purge")(moves.purge_shards)
node_app.command("drain")(moves.drain_node)
