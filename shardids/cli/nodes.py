"""``shardids node``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.ids import parse_time
from shardids.cli.printing import err, out, print_json, print_warnings
from shardids.cli.tables.query_node import StorePasswordOption
from shardids.errors import BadArgument
from shardids.pg.notation import counted, named_shards, parse_shards, shown_shards

if TYPE_CHECKING:
    from shardids.catalog.topology import Placement
    from shardids.mover import clocks, failover

app = typer.Typer(help="The PostgreSQL databases that hold shards.", no_args_is_help=True)


@app.command("add")
@takes("catalog", "dry-run")
def add_node(
    run: Run,
    name: Annotated[str, typer.Argument(help="A letter, then letters, digits, _ - . (40 at most)")],
    url: Annotated[str, typer.Option(help="Its database; a password in it is used now but not kept.")],
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
) -> None:
    """Install the engine in a database and register it as a node. Idempotent."""
    from shardids.catalog.nodes import Nodes
    from shardids.catalog.topology import Node
    from shardids.cli.rebalance import rebalance_all
    from shardids.migrate.environment import Environment
    from shardids.migrate.node_revisions import require_migrated
    from shardids.tables import references, views

    environment = None if migrations is None else Environment.at(migrations)
    there = run.catalog

    def migrate() -> None:
        if environment is not None:
            with Nodes({name: Node(name=name, url=url)}, there.url, autocommit=True) as nodes:
                require_migrated(environment, name, nodes[name])

    is_first = not there.nodes()
    if query_node is not None and not is_first:
        raise BadArgument(
            "--query-node goes with the first node", hint="Later: shardids query-node create --url URL"
        )
    references.add_node(there, name, url, region=region, migrate=migrate, dry_run=run.dry)
    warnings: tuple[str, ...] = ()
    if is_first and not run.dry:
        where = {"node": name} if query_node is None else {"url": query_node}
        warnings = views.found_query_node(there, **where, store_password=store_password)
    elif not run.dry:
        warnings = views.follow(there, store_password=store_password)
    print_warnings(warnings)
    out.print(f'{"Would add" if run.dry else "Added"} node "{name}"')
    if rebalance and not run.dry:
        rebalance_all(run)


@app.command("accept-contract")
@takes("catalog", "dry-run", "yes", "json")
def accept_contract(
    run: Run, names: Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default="all")] = None
) -> None:
    """Record the present settings, extensions and objects for all tables as the contract of nodes."""
    from shardids.migrate.recording import accept_nodes, plan_node_acceptance

    accepted = plan_node_acceptance(run.catalog, names or ())
    changed = [one for one in accepted if one.lines]
    if run.as_json:
        print_json([{"node": one.node, "differences": list(one.lines)} for one in accepted])
    for one in changed if not run.as_json else ():
        out.print(f'Node "{one.node}"{"" if one.is_recorded else ", not recorded yet"}:')
        for line in one.lines:
            out.print(f"  {line}")
    if not changed:
        err.print("Nothing to record: the nodes are as is recorded")
        return
    run.ask(f"Record this as the contract of {', '.join(one.node for one in changed)}?")
    if not run.dry:
        accept_nodes(run.catalog, changed, "node accept-contract")
        err.print("Recorded")


@app.command("list")
@takes("catalog", "json")
def list_nodes(run: Run) -> None:
    """List the nodes, their regions, and how many shards each holds."""
    there = run.catalog
    placement = there.placement()
    held = Counter(placement.node_of.values())
    rows = [
        {"node": node.name, "region": node.region, "shards": held[node.name], "url": node.url}
        for node in placement.nodes.values()
    ]
    run.print_rows(rows, empty="No node yet. To add one: shardids node add NAME --url URL")


@app.command("remove")
@takes("catalog", "dry-run")
def remove_node(run: Run, name: str) -> None:
    """Remove the engine from a node that holds no shards, and the node from the catalog."""
    from shardids.tables import references, views

    there = run.catalog
    references.remove_node(there, name, dry_run=run.dry)
    warnings = () if run.dry else views.follow(there)
    print_warnings(warnings)
    out.print(f'{"Would remove" if run.dry else "Removed"} node "{name}"')


@app.command("replace")
@takes("catalog", "dry-run", "json")
def replace_node(
    run: Run,
    name: str,
    url: Annotated[str, typer.Option(help="The server that took over; a password in it is not kept.")],
    accept_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARDS",
            help="Lost shards that get a home again: their newest copy, or an empty shard without a copy.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --accept-loss: give up rows that no copy has.")
    ] = False,
) -> None:
    """Point a node that was lost at its promoted standby.

    Shards that the standby lacks count as lost: nobody is sent to them until --accept-loss. Exits 3 if
    any is left. Repeat it to see them again, or to resume it.
    """
    from shardids.tables import references

    if accept_loss is None:
        refuse("without --accept-loss", yes=yes)
    elif not (yes or run.dry):
        raise BadArgument(
            "--accept-loss gives up writes to the shards since their newest copy",
            hint="To see their copies: --dry-run. To go on: --yes",
        )
    there = run.catalog
    accepted = [] if accept_loss is None else parse_shards(accept_loss, there.shard_total())
    done, left = references.replace_node(there, name, url, accept_loss=accepted, dry_run=run.dry)
    outside = _homes_outside(done, there.placement())
    if run.as_json:
        print_json(_replacement_row(done))
    else:
        _print_replacement(done, dry_run=run.dry)
    print_warnings(outside)
    print_warnings(done.open_key_moves)
    print_warnings(done.stale_views)
    print_warnings(left)
    if done.lost:
        raise typer.Exit(3)


def _replacement_row(done: failover.Replacement) -> dict[str, object]:
    from shardids.mover.homes import LostShard

    def row(lost: LostShard) -> dict[str, object]:
        return {
            "shard": lost.shard,
            "reason": lost.reason,
            "home": lost.copy.node if lost.copy else None,
            "left": lost.remains(),
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
        "open_key_moves": done.open_key_moves,
    }


def _homes_outside(done: failover.Replacement, placement: Placement) -> list[str]:
    """Lost shards whose home is on a node of another region: nobody else has their rows, if they have any."""
    from shardids.catalog.regions import in_region

    homes = {one.shard: placement.nodes[one.home] for one in (*done.accepted, *done.lost)}
    return [
        f'shard {shard} is {in_region(placement.region_of(shard))}, and node "{home.name}", its home, is'
        f" {in_region(home.region)}. To bring it to a node of its own: shardids rebalance"
        for shard, home in homes.items()
        if home.region != placement.region_of(shard)
    ]


def _print_replacement(done: failover.Replacement, *, dry_run: bool) -> None:
    would = "would be" if dry_run else "is"
    out.print(f'Node "{done.node}" {would} at {done.url}, with {counted(done.shards, "shard")}')
    for lost in done.accepted:
        out.print(
            f'Shard {lost.shard} {would} on node "{lost.home}": {lost.reason}; {lost.remains()}.'
            " What was written to it later is given up."
        )
    for lost in done.lost:
        out.print(f"Shard {lost.shard} {would} lost: {lost.reason}; {lost.remains()}.")
    for shard in done.fenced:
        fenced = f"{'Would fence' if dry_run else 'Fenced'} shard {shard} there"
        err.print(f"{fenced}: it had moved away, and the standby had not heard of it")
    for shard in done.stopped:
        err.print(f"Shard {shard} is fenced there. To let it issue IDs: shardids shard activate {shard}")
    for schema in done.set_aside:
        err.print(f"An incomplete copy was kept as schema {schema}: drop it when nobody needs its rows")
    if done.lost:
        shards = shown_shards(lost.shard for lost in done.lost)
        err.print(
            "No client is sent to a lost shard. To give it the home that is named here:"
            f" shardids node replace {done.node} --url {shlex.quote(done.url)} --accept-loss {shards} --yes"
        )


@app.command("confirm-clock")
@takes("catalog", "dry-run")
def confirm_clock(run: Run, name: str) -> None:
    """Confirm that a node's clock is right, although it went ahead by more than max_step at once.

    Compares it with the clocks of the catalog, of the other nodes and of this machine. If they agree, all
    shards of the node issue IDs again.
    """
    from shardids.mover import clocks

    there = run.catalog
    compared = clocks.confirm_clock(there, name, dry_run=run.dry)
    _print_comparison(compared)
    out.print(f'{"Would confirm" if run.dry else "Confirmed"} the clock of node "{name}"')


def _print_comparison(compared: clocks.Comparison) -> None:
    for other in compared.others:
        out.print(f'The clock of node "{compared.node}" is {other}')
    if compared.is_with_this_machine_only:
        same = "".join(f", {name}" for name in compared.same_server)
        out.print(
            f'No other server was compared: node "{compared.node}"{same} are one server'
            if same
            else "No other server was compared"
        )
    _print_unreachable(compared.unreachable, "its clock was not compared")


def _print_unreachable(unreachable: Mapping[str, str], what: str) -> None:
    print_warnings(f"{name} did not answer, {what}: {reason}" for name, reason in unreachable.items())


@takes("catalog", "dry-run", "yes")
def reset_clock(
    run: Run,
    shards: Annotated[str, typer.Argument(help="Numbers and ranges: 5, or 0-31,40.")],
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="The earliest time that the wrong clock showed, if the node has not recorded it.",
        ),
    ] = None,
) -> None:
    """Bring shards back that a wrong clock took into the future.

    Each begins again max_ahead past the present, and passes over the IDs of the wrong clock when their time
    comes. Repeat it to continue after an interruption, to bring the range to nodes that did not answer, and
    to make draws quick again once the range has passed.
    """
    from shardids.mover import clocks

    first = None if since is None else parse_time(since)
    there = run.catalog
    numbers = parse_shards(shards, there.shard_total())
    for shard in numbers if run.dry else ():
        _print_reset(clocks.reset_clock(there, shard, since=first, dry_run=True), dry_run=True)
    if run.dry:
        return
    run.ask(
        f"Reset the clock of {named_shards(numbers)}? Meanwhile they issue no IDs; --dry-run shows"
        " what is passed over later."
    )
    for shard in numbers:
        _print_reset(clocks.reset_clock(there, shard, since=first), dry_run=False)


def _print_reset(done: clocks.Reset, *, dry_run: bool) -> None:
    from shardids.mover import clocks

    would, shard = "Would " if dry_run else "", f'shard {done.shard} on node "{done.node}"'
    match done.work:
        case clocks.Work.RESET:
            done_it = "reset" if dry_run else "Reset"
        case clocks.Work.ACTIVATE:
            done_it = "activate" if dry_run else "Activated"
        case clocks.Work.RELEASE:
            done_it = "make draws quick again in" if dry_run else "Made draws quick again in"
        case clocks.Work.NOTHING:
            would, done_it = "", "Nothing to do for"
    reason = {
        clocks.Work.RESET: "",
        clocks.Work.ACTIVATE: ": its clock was reset, and the command interrupted",
        clocks.Work.RELEASE: ": it has passed over the IDs of the wrong clock",
        clocks.Work.NOTHING: ": its clock was reset, and the IDs of the wrong clock are still to come",
    }[done.work]
    out.print(f"{would}{done_it} {shard}{reason}")
    if (plan := done.plan) is not None:
        out.print(f"  lead          {plan.lead}")
        out.print(f"  begins again  {_moment(plan.starts)}, max_ahead past the present")
        out.print(f"  passes over   {_moment(plan.first)} to {_moment(plan.last)}")
        if plan.outage is not None:
            begins, ends = plan.outage
            out.print(f"  no IDs        {_moment(begins)} to {_moment(ends)}: longer than max_ahead")
    _print_unreachable(
        {f'node "{name}"': reason for name, reason in done.unreachable.items()},
        "and was not looked at" if dry_run else "and lacks the range; run it again when it does",
    )


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
