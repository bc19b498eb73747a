"""``shardids key``: keys of tables that stay where they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.printing import out, print_json, print_warnings
from shardids.errors import BadArgument

app = typer.Typer(help="Let keys of existing tables draw from a shard, where they are.", no_args_is_help=True)


@app.command()
@takes("catalog", "dry-run", "yes", "json")
def adopt(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table, with its schema: public.orders")],
    shard: Annotated[int, typer.Option(min=0, help="The shard, which lives in the same database.")],
    show: Annotated[bool, typer.Option("--status", help="Show how far it is; change nothing.")] = False,
    back: Annotated[bool, typer.Option("--back", help="Restore the table.")] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Draw IDs from the shard, and drop the old columns.")
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="ROWS", help="About how many rows to fill in a transaction.", show_default="2000"
        ),
    ] = None,
    pause: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="How long to wait between two of them.", show_default="0"
        ),
    ] = None,
) -> None:
    """Widen one table's integer key, and what refers to it, to bigint, while applications use it.

    The new columns stand beside the old ones, are filled, indexed and referred to, and take their names in
    one short transaction. IDs come from the old sequence until --finish. A key that is bigint already only
    gets next_id() as its default. Run again, it goes on where it was interrupted.
    """
    from shardids.adopt.inplace import changing, keys
    from shardids.cli.adopt.shown import print_table, shown
    from shardids.tables import views

    if show + back + finish > 1:
        raise BadArgument("--status, --back and --finish exclude each other")
    if show:
        refuse("to --status", batch=batch, pause=pause, yes=run.yes, dry_run=run.dry)
    there = run.catalog
    with shown() as show_event:
        how = changing.How(batch=batch or 2000, pause_s=pause or 0.0, on_event=show_event)
        if show:
            done = keys.status(there, name, shard)
        elif back:
            done = keys.take_back(there, name, shard, how, dry_run=run.dry)
        elif finish:
            run.ask("Drop the old columns, for good?")
            done = keys.finish(there, name, shard, how, dry_run=run.dry)
        else:
            done = keys.change_key(there, name, shard, how, dry_run=run.dry)
        print_warnings(() if run.dry or show else views.follow(there))
    if run.as_json:
        print_json(asdict(done))
    else:
        print_table(done, is_done=back or finish, dry_run=run.dry)


@app.command()
@takes("catalog", "dry-run", "json")
def function(
    run: Run,
    name: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="The function, with its schema: insta5.next_id")
    ],
    shard: Annotated[
        int, typer.Option(min=0, help="The shard in the function's IDs. It lives in the same database.")
    ],
    back: Annotated[bool, typer.Option("--back", help="Restore the function, and fence the shard.")] = False,
) -> None:
    """Let a function that issues IDs of the cluster's layout issue those of a shard from now on.

    For databases that use the function published by Instagram, or one like it. Tables, defaults and what
    calls the function stay as they are; writers wait for 50 ms at most in each attempt. No ID comes again.
    --back restores the function's former body once the clock is above the shard's last ID.
    """
    from shardids.adopt.inplace.functions import replace_function, restore_function
    from shardids.cli.adopt.shown import shown

    there = run.catalog
    if back:
        with shown() as show:
            restored = restore_function(there, name, shard, dry_run=run.dry, on_event=show)
        if run.as_json:
            print_json(asdict(restored))
            return
        out.print(f"{restored.function} {'would have' if run.dry else 'has'} its former body again")
        out.print(f"columns: {', '.join(restored.columns)}")
        out.print(f"shard {shard} {'would be' if run.dry else 'is'} fenced; its last ID: {restored.last_id}")
        return
    with shown() as show:
        done = replace_function(there, name, shard, dry_run=run.dry, on_event=show)
    if run.as_json:
        print_json(asdict(done))
        return
    verb = "would draw" if run.dry else "draws"
    out.print(f"{done.function} {verb} from shard {done.shard}")
    out.print(f"columns: {', '.join(done.columns)}")
    out.print(f"highest ID in them: {done.highest_id}")
    out.print(f"new ones are above: {done.first_id - 1}")
