"""``shardids init``, ``grant`` and ``upgrade``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from shardids.cli.command import LAYOUTS, Run, refuse, takes
from shardids.cli.migrate import JobsOption, LockTimeoutOption, RetriesOption
from shardids.cli.printing import err, out, print_rows
from shardids.cli.tables.query_node import report
from shardids.ids.layout import Layout
from shardids.pg.notation import counted, parse_duration_ms, parse_shards, shown_shards

_FEW_YEARS = 10
"""``init`` warns of a layout that ends in fewer years."""


@takes("catalog", "dry-run")
def init(
    run: Run,
    shards: Annotated[int, typer.Option(help="Number of logical shards; fixed for good.")] = 1024,
    layout: Annotated[
        str, typer.Option(metavar="NAME|T-S-Q[@EPOCH_MS]", help=f"{LAYOUTS}; fixed for good.")
    ] = "default",
    schema_prefix: Annotated[str, typer.Option(help="Prefix of the names of shards' schemas.")] = "shard_",
    engine: Annotated[
        Literal["postgresql", "citus"],
        typer.Option(
            help="Of citus: --catalog is the coordinator, which becomes the only node, and Citus places the"
            " shards on its workers; fixed for good."
        ),
    ] = "postgresql",
) -> None:
    """Create the catalog of a new cluster. Idempotent."""
    from shardids.beside.citus import setup
    from shardids.migrate.install import provision

    chosen = Layout.parse(layout)
    there = run.catalog
    make = setup.init if engine == "citus" else provision.init
    description = make(there, chosen, shards, schema_prefix, dry_run=run.dry)
    if chosen.negative_from is not None:
        err.print(
            f"[yellow]Warning:[/] layout {chosen.name} uses the sign bit: from"
            f" {chosen.negative_from:%Y-%m-%d} on its IDs are negative and sort before the older ones.",
            markup=True,
        )
    done = "Would make" if run.dry else "Made"
    out.print(f"{done} cluster {description.cluster}: {counted(shards, 'shard')}, layout {chosen}")
    years = chosen.years_left(datetime.now(UTC))
    out.print(f"  time     until {chosen.last_time:%Y-%m-%d}, {years:.1f} years left")
    each = chosen.ids_per_second
    out.print(f"  IDs      {each:,} a second in each shard, {each * shards:,} in all")
    out.print(f"  shards   {shards:,} of {chosen.shard_limit:,} that the layout has room for")
    if years < _FEW_YEARS:
        err.print(
            f"[yellow]Warning:[/] layout {chosen} ends on {chosen.last_time:%Y-%m-%d}: from then on no shard"
            " issues IDs. A layout is fixed for good.",
            markup=True,
        )


@takes("catalog", "dry-run")
def grant(
    run: Run,
    role: Annotated[str, typer.Argument(help="A role that exists on the nodes, or on the query node.")],
    shards: Annotated[
        str | None, typer.Option(help="Numbers and ranges, 0-31,40, or all.", show_default="all")
    ] = None,
    query_node: Annotated[
        bool,
        typer.Option(
            "--query-node",
            help="Instead, let it read every table of the query node, also those to come, with its owner's"
            " rights.",
        ),
    ] = False,
) -> None:
    """Let an application role draw IDs: draw, reserve and decode, nothing else."""
    from shardids.migrate.install import provision
    from shardids.tables import views

    if query_node:
        refuse("to --query-node", shards=shards)
        report(run, views.grant(run.catalog, role, dry_run=run.dry), "changed")
        return
    numbers = None
    if shards not in (None, "all"):
        numbers = parse_shards(str(shards), run.catalog.shard_total())
    count = provision.grant(run.catalog, role, numbers, dry_run=run.dry)
    out.print(f'{"Would grant" if run.dry else "Granted"} use of {counted(count, "shard")} to "{role}"')


@takes("catalog", "dry-run")
def upgrade(
    run: Run, jobs: JobsOption = 1, lock_timeout: LockTimeoutOption = "2s", retries: RetriesOption = 5
) -> None:
    """Bring shardids' own objects to this version: the catalog, the nodes, then the shards."""
    from shardids.catalog.nodes import Nodes
    from shardids.cli.migrate.shown import Interruption, Progress
    from shardids.migrate.install.upgrade import shards_behind, targets
    from shardids.migrate.install.upgrade import upgrade as upgrade_objects
    from shardids.migrate.player import Limits
    from shardids.migrate.runner import RunSettings, one_run

    settings = RunSettings(
        jobs=jobs, retries=retries, limits=Limits(lock_timeout_ms=parse_duration_ms(lock_timeout))
    )
    there = run.catalog
    if run.dry:
        with Nodes(there.nodes(), there.url) as nodes:
            found = targets(there, nodes)
        # The shards' revisions are read by what the nodes get first.
        waiting = shards_behind(there) if all(target.is_current for target in found) else []
        rows = [
            {"what": target.tree, "name": target.name, "from": target.revision, "to": target.newest}
            for target in found
            if not target.is_current
        ]
        if waiting:
            out.print(f"Would upgrade {counted(len(waiting), 'shard')}: {shown_shards(waiting)}")
        else:
            print_rows(rows, empty="The catalog, the nodes and the shards are up to date")
        return
    with (
        one_run(there, "upgrade") as leases,
        Interruption() as interruption,
        Progress() as progress,
    ):
        done = upgrade_objects(
            there,
            settings,
            progress,
            interruption.stop,
            lambda target: out.print(f"Upgraded {target.tree} {target.name} to {target.newest}"),
            leases=leases,
        )
    for outcome in done.shards.outcomes:
        if outcome.error:
            err.print(f"shard {outcome.shard}: {outcome.error}")
    changed = done.shards.of("done")
    if changed:
        out.print(f"Upgraded {counted(len(changed), 'shard')}: {shown_shards(one.shard for one in changed)}")
    if not done.shards.succeeded or done.shards.interrupted:
        err.print("To continue, run it again: shardids upgrade")
        raise typer.Exit(1)
    if not changed and all(target.is_current for target in done.targets):
        out.print("Nothing to do: everything is up to date")
