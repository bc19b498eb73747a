"""``shardids adopt function``: a function that issues IDs becomes one of a shard."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.output import err, out


def function(
    name: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="The function, with its schema: insta5.next_id")
    ],
    catalog: CatalogOption,
    shard: Annotated[
        int, typer.Option(min=0, help="The shard in the function's IDs. It lives in the same database.")
    ],
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a function that issues IDs of the cluster's layout issue those of a shard from now on.

    For databases that use the function published by Instagram, or one like it. Tables, defaults and what
    calls the function stay as they are; writers wait for 0.1 s at most. No ID is issued again.
    """
    from shardids.inplace.functions import replace_function

    with opened(catalog) as there:
        done = replace_function(
            there, name, shard, dry_run=dry_run, on_wait=lambda text: err.print(text, markup=False)
        )
    if as_json:
        print_json(asdict(done))
        return
    verb = "would draw" if dry_run else "draws"
    out.print(f"{done.function} {verb} from shard {done.shard}", markup=False)
    out.print(f"columns: {', '.join(done.columns)}", markup=False)
    out.print(f"highest ID in them: {done.highest_id}")
    out.print(f"new ones are above: {done.first_id - 1}")
