"""``shardids tenant move``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardids.cli.command import NewTablesOption, Run, TrustOption, refuse, takes
from shardids.cli.printing import err, out, print_json, print_rows, print_warnings
from shardids.errors import BadArgument
from shardids.pg.notation import counted, parse_duration_ms

if TYPE_CHECKING:
    from pathlib import Path

    from shardids import tenants
    from shardids.catalog.rows import Catalog


@takes("catalog", "dry-run", "json")
def move_tenant(
    run: Run,
    key: Annotated[str | None, typer.Argument(help="The key.")] = None,
    to_shard: Annotated[int | None, typer.Option(help="The shard to move its rows to.")] = None,
    new_shard: Annotated[
        bool, typer.Option("--new-shard", help="Make a shard for it, which no other key is hashed to.")
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="The node of the new shard; by default that with fewest shards."),
    ] = None,
    migrations: NewTablesOption = None,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE[.COLUMN]",
            help="The table with the key's row, and the column with the key; by default the primary key."
            " Of a key that was moved before, as then.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="TABLE.COLUMN",
            help="A column that holds the root's primary key without a foreign key.",
        ),
    ] = None,
    loose: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="A table whose rows stay where they are.")
    ] = None,
    refers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.COLUMN", help="A column that holds IDs of other rows without a foreign key."
        ),
    ] = None,
    region: Annotated[str | None, typer.Option(help="The region that the key is of.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Move it to where it came from.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a move that was interrupted.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Undo a move that was interrupted.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the moves of keys.")] = False,
    max_pause: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long writers of the key may wait, by default 1s.")
    ] = None,
    settle: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long clients have to hear of the move, before and after the switch, by default 2s.",
        ),
    ] = None,
    on_busy: Annotated[
        Literal["wait", "skip"],
        typer.Option(
            help="Another command is changing one of the two shards: wait until it has ended, or give up."
        ),
    ] = "wait",
    trust: TrustOption = None,
) -> None:
    """Move the rows of one key to another shard while they are written to.

    Others in the shard don't wait. The old shard refuses the key from then on.
    """
    from shardids import tenants
    from shardids.catalog.leases import OnBusy

    if [to_shard is not None, new_shard, back, resume, abort, listed].count(True) != 1:
        raise BadArgument(
            "say what to do: one of --to-shard N, --new-shard, --back, --resume, --abort and --list"
        )
    if not new_shard:
        refuse("without --new-shard", to=to)
    if listed:
        refuse("to --list", max_pause=max_pause, settle=settle, root=root, dry_run=run.dry, trust=trust)
        moves = tenants.all_key_moves(run.catalog)
        rows = [_row_of(one) for one in moves if key is None or one.is_of(key)]
        run.print_rows(rows, empty="No key was ever moved")
        return
    if resume or abort:
        refuse(
            "to --resume and --abort, which go on as the move began",
            root=root,
            key=column,
            loose=loose,
            refers=refers,
            region=region,
            dry_run=run.dry,
        )
    if key is None:
        raise BadArgument(
            "the key is missing",
            hint="For example: shardids tenant move acme --to-shard 900 --root tenants.name",
        )
    choices = None
    if root is not None:
        choices = tenants.Choices(
            root=root,
            keys=tuple(column or ()),
            loose=tuple(loose or ()),
            refers=tuple(refers or ()),
            region=region,
        )
    else:
        refuse("without --root", key=column, loose=loose, refers=refers, region=region)
    options = tenants.Options(
        max_pause_s=_seconds(max_pause, 1.0),
        settle_s=_seconds(settle, 2.0),
        on_busy=OnBusy(on_busy),
        trusted=tuple(trust or ()),
    )
    if resume:
        done = tenants.resume(run.catalog, key, options=options, on_event=_show)
    elif abort:
        done = tenants.abort(run.catalog, key, options=options, on_event=_show)
    else:
        with _new(run.catalog, to, migrations) if new_shard else nullcontext() as new:
            if run.dry:
                plan = tenants.plan(
                    run.catalog, key, to_shard, choices, new=new, back=back, trusted=options.trusted
                )
                _print_plan(run, plan, is_new=new_shard)
                return
            done = tenants.move(
                run.catalog, key, to_shard, choices, new=new, options=options, back=back, on_event=_show
            )
    _print_result(run, done)


@contextmanager
def _new(catalog: Catalog, node: str | None, migrations: Path | None) -> Iterator[tenants.NewShard]:
    from shardids import tenants
    from shardids.migrate.environment import Environment
    from shardids.migrate.migration import migrator_of_new_shards

    if migrations is None:
        yield tenants.NewShard(node=node)
        return
    with migrator_of_new_shards(catalog, Environment.at(migrations)) as migrate:
        yield tenants.NewShard(node=node, migrate=migrate)


def _seconds(text: str | None, default: float) -> float:
    return default if text is None else parse_duration_ms(text) / 1000


def _show(event: tenants.Event) -> None:
    from shardids import tenants

    match event:
        case tenants.StepBegun(step=step):
            err.print(step)
        case tenants.Waiting(attempt=attempt, reason=reason):
            err.print(f"put off ({attempt}): {reason}")
        case tenants.Noted(note=note):
            print_warnings([note])


def _print_plan(run: Run, plan: tenants.KeyPlan, *, is_new: bool) -> None:
    tables: Sequence[dict[str, object]] = [
        {"table": name, "rows": count} for name, count in plan.rows.items()
    ]
    if run.as_json:
        print_json(
            {
                "key": plan.key,
                "kind": plan.kind,
                "source": plan.source,
                "target": plan.target,
                "is_new": is_new,
                "source_node": plan.source_node,
                "target_node": plan.target_node,
                "rows": dict(plan.rows),
                "loose": list(plan.loose),
            }
        )
        return
    out.print(
        f"{counted(sum(plan.rows.values()), 'row')} of {plan.kind} key {plan.key!r} would move from shard"
        f' {plan.source} on node "{plan.source_node}" to {"new " * is_new}shard {plan.target} on node'
        f' "{plan.target_node}"',
        markup=False,
    )
    print_rows(tables)


def _print_result(run: Run, done: tenants.KeyResult) -> None:
    if run.as_json:
        print_json(
            {
                "key": done.key,
                "source": done.source,
                "target": done.target,
                "outcome": done.outcome,
                "seconds": round(done.seconds, 3),
                "pause_ms": done.pause_ms,
                "unsettled_ms": done.unsettled_ms,
                "rows": dict(done.rows),
            }
        )
    elif done.outcome == "moved":
        pause = "" if done.pause_ms is None else f"; its writers waited {done.pause_ms:,.0f} ms"
        rows = f", {counted(sum(done.rows.values()), 'row')}" if done.rows else ""
        out.print(f"key {done.key!r} lives in shard {done.target}{rows}{pause}", markup=False)
    else:
        out.print(f"key {done.key!r} lives in shard {done.source} as before", markup=False)
    print_warnings(done.stale_views)


def _row_of(move: tenants.KeyMove) -> dict[str, object]:
    return {
        "key": move.key,
        "kind": move.kind,
        "source": move.source,
        "target": move.target,
        "state": move.outcome or f"at step {move.step}",
        "rows": move.rows,
        "started": move.started_at,
        "ended": move.ended_at,
    }
