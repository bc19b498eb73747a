"""``shardids upgrade``: brings shardids' own objects to the installed version."""

from __future__ import annotations

import typer

from shardids.catalog.nodes import Nodes
from shardids.catalog.notation import parse_duration_ms, shown_shards
from shardids.cli.common import CatalogOption, DryRunOption, opened
from shardids.cli.migrate_options import JobsOption, LockTimeoutOption, RetriesOption
from shardids.cli.migrate_show import Interruption, Progress
from shardids.cli.output import err, out, print_rows
from shardids.install.upgrade import shards_behind, targets
from shardids.install.upgrade import upgrade as upgrade_objects
from shardids.migrate.player import Limits
from shardids.migrate.runner import RunSettings, one_run


def upgrade(
    catalog: CatalogOption,
    jobs: JobsOption = 1,
    lock_timeout: LockTimeoutOption = "2s",
    retries: RetriesOption = 5,
    dry_run: DryRunOption = False,
) -> None:
    """Bring shardids' own objects to this version: the catalog, the nodes, then the shards."""
    settings = RunSettings(
        jobs=jobs, retries=retries, limits=Limits(lock_timeout_ms=parse_duration_ms(lock_timeout))
    )
    with opened(catalog) as there:
        if dry_run:
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
                out.print(f"Would upgrade {len(waiting)} shards: {shown_shards(waiting)}")
            else:
                print_rows(rows, as_json=False, empty="The catalog, the nodes and the shards are up to date")
            return
        with one_run(there, "upgrade"), Interruption() as interruption, Progress() as progress:
            done = upgrade_objects(
                there,
                settings,
                progress,
                interruption.stop,
                lambda target: out.print(
                    f"Upgraded {target.tree} {target.name} to {target.newest}", markup=False
                ),
            )
    for outcome in done.shards.outcomes:
        if outcome.error:
            err.print(f"shard {outcome.shard}: {outcome.error}", markup=False)
    changed = done.shards.of("done")
    if changed:
        out.print(f"Upgraded {len(changed)} shards: {shown_shards(one.shard for one in changed)}")
    if not done.shards.succeeded or done.shards.interrupted:
        err.print("To continue, run it again: shardids upgrade")
        raise typer.Exit(1)
    if not changed and all(target.is_current for target in done.targets):
        out.print("Nothing to do: everything is up to date")
