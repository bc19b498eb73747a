"""``shardids transactions`` and ``restore-point``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.printing import err, out, print_error, print_json
from shardids.errors import ShardidsError
from shardids.pg.notation import named_nodes, parse_duration_ms

if TYPE_CHECKING:
    from shardids.catalog.prepared import Prepared


@takes("catalog", "dry-run", "json")
def transactions(
    run: Run,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="Commit or roll back these transactions, on all nodes alike.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With --resolve: roll back what was prepared longer ago and not decided. What was decided"
            " is ended at once.",
            show_default="5s",
        ),
    ] = None,
) -> None:
    """List, or end, transactions that dead clients left prepared on the nodes, and their decisions."""
    from shardids.tables import transactions as room

    if not resolve:
        refuse("without --resolve", older_than=older_than, dry_run=run.dry)
        listing = room.listed(run.catalog)
        rows = [_row(one.prepared) | {"decision": str(one.decision)} for one in listing.doubts]
        _print(run, rows, listing.failures)
        _exit_with(listing.failures)
        return
    older_than_s = room.OLDER_THAN_S if older_than is None else parse_duration_ms(older_than) / 1000
    done = room.resolve(run.catalog, older_than_s=older_than_s, dry_run=run.dry)
    rows = [
        _row(one.prepared) | {"would be" if run.dry else "was": one.result, "because": one.reason}
        for one in done.outcomes
    ]
    _print(run, rows, done.failures)
    if done.forgotten:
        err.print(f"{done.forgotten} decisions that nobody needs any more deleted")
    errors = {f"{one.prepared.node}: {one.prepared.name}": one.error for one in done.outcomes if one.error}
    _exit_with({**errors, **done.failures})


def _print(run: Run, rows: list[dict[str, object]], failures: Mapping[str, ShardidsError]) -> None:
    """Print transactions, and which nodes were not asked."""
    asked = [name for name in run.catalog.nodes() if name not in failures] if failures else []
    if not failures:
        empty = "Nothing is prepared on any node."
    elif asked:
        empty = f"Nothing is prepared on {named_nodes(asked)}."
    else:
        empty = "No node could be asked."
    run.print_rows(rows, empty=empty)
    if asked:
        err.print(f"Not asked: {named_nodes(sorted(failures))}.")


def _row(one: Prepared) -> dict[str, object]:
    return {
        "node": one.node,
        "transaction": one.name if one.gid is None else str(one.gid.transaction),
        "part": "" if one.gid is None else f"{one.gid.number}/{one.gid.count}",
        "decider": "" if one.gid is None else one.gid.decider,
        "role": one.owner,
        "age_s": round(one.age_s),
    }


def _exit_with(errors: Mapping[str, ShardidsError]) -> None:
    """Print the errors, each once, and exits with 1 if there are any."""
    for message, hint in dict.fromkeys((error.message, error.hint) for error in errors.values()):
        print_error(message, hint)
    if errors:
        raise typer.Exit(1)


@takes("catalog", "dry-run", "json")
def restore_point(
    run: Run,
    name: Annotated[str, typer.Argument(help="The name to set in recovery_target_name; not used before.")],
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="How long commits on several nodes may be kept waiting.")
    ] = "10s",
) -> None:
    """Mark a moment on all servers, so that they can be restored to it together."""
    there = run.catalog
    from shardids.tables import transactions as room

    made = room.create_restore_point(there, name, within_s=parse_duration_ms(within) / 1000, dry_run=run.dry)
    if run.as_json:
        print_json({"name": made.name, "positions": dict(made.positions), "held_s": round(made.held_s, 3)})
        return
    word = "could be created" if run.dry else "is"
    out.print(f"Restore point {made.name} {word} on the servers of: {', '.join(made.positions)}")
    out.print(f"Commits on several nodes waited for {made.held_s:.3f} s at most")
