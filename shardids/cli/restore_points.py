"""``shardids restore-point``: marks a moment in the logs of all servers."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids import transactions
from shardids.catalog.notation import parse_duration_ms
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.output import out


def restore_point(
    name: Annotated[str, typer.Argument(help="What recovery_target_name will be; never used before.")],
    catalog: CatalogOption,
    within: Annotated[
        str, typer.Option(metavar="DURATION", help="How long commits on several nodes may be kept waiting.")
    ] = f"{transactions.WITHIN_S:g}s",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Mark a moment on all servers to which they can be restored together."""
    with opened(catalog) as there:
        made = transactions.create_restore_point(
            there, name, within_s=parse_duration_ms(within) / 1000, dry_run=dry_run
        )
    if as_json:
        print_json({"name": made.name, "positions": dict(made.positions), "held_s": round(made.held_s, 3)})
        return
    word = "could be created" if dry_run else "is"
    out.print(
        f"Restore point {made.name} {word} on the servers of: {', '.join(made.positions)}", markup=False
    )
    out.print(f"Commits on several nodes waited for {made.held_s:.3f} s at most")
