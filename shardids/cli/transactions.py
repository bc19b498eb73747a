"""``shardids transaction``: lists and ends what clients have left prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from shardids import transactions
from shardids.catalog.notation import parse_duration_ms
from shardids.catalog.prepared import Prepared
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened
from shardids.cli.output import err, print_error, print_rows
from shardids.errors import ShardidsError

app = typer.Typer(help="Transactions on several nodes that were not ended.", no_args_is_help=True)

_EMPTY = "Nothing is prepared on any node."


@app.command("list")
def list_transactions(catalog: CatalogOption, as_json: JsonOption = False) -> None:
    """List what is prepared on the nodes, and what was decided on it. Changes nothing."""
    with opened(catalog) as there:
        listing = transactions.listed(there)
    rows = [_row(one.prepared) | {"decision": str(one.decision)} for one in listing.doubts]
    print_rows(rows, as_json=as_json, empty=_EMPTY)
    _exit_with(listing.failures)


@app.command()
def resolve(
    catalog: CatalogOption,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Roll back what was prepared longer ago and not decided. What was decided is ended at once.",
        ),
    ] = f"{transactions.OLDER_THAN_S:g}s",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Commit or roll back what clients that died have left prepared, on all nodes alike."""
    with opened(catalog) as there:
        done = transactions.resolve(there, older_than_s=parse_duration_ms(older_than) / 1000, dry_run=dry_run)
    rows = [
        _row(one.prepared) | {"would be" if dry_run else "was": one.result, "because": one.reason}
        for one in done.outcomes
    ]
    print_rows(rows, as_json=as_json, empty=_EMPTY)
    if done.forgotten:
        err.print(f"{done.forgotten} decisions that nobody needs any more deleted")
    errors = {f"{one.prepared.node}: {one.prepared.name}": one.error for one in done.outcomes if one.error}
    _exit_with({**errors, **done.failures})


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
    """Prints the errors, each once, and exits with 1 if there are any."""
    for message, hint in dict.fromkeys((error.message, error.hint) for error in errors.values()):
        print_error(message, hint)
    if errors:
        raise typer.Exit(1)
