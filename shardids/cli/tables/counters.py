"""``shardids counter``: kinds of numbers for people, and their counters."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.printing import out
from shardids.errors import BadArgument
from shardids.pg.notation import counted

if TYPE_CHECKING:
    pass

app = typer.Typer(help="Numbers for people, which begin again each day, month or year.", no_args_is_help=True)

TenantArgument = Annotated[str, typer.Argument(help="The tenant, as the rows' column has it, as text.")]
KindArgument = Annotated[str, typer.Argument(help="The kind of numbers.")]
ShardOption = Annotated[
    int | None, typer.Option(help="The tenant's shard; by default the one where it has numbers.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; it is recorded with your name.")]
Period = Literal["day", "month", "year", "never"]
PeriodOption = Annotated[
    str | None,
    typer.Option(
        metavar="DATE", help="A day of the counter's period (YYYY-MM-DD); by default the present one."
    ),
]


@app.command()
@takes("catalog", "dry-run")
def define(
    run: Run,
    kind: KindArgument,
    per: Annotated[Period, typer.Option(help="When its counters begin again.")],
    zone: Annotated[str, typer.Option(help="The time zone of tenants that have none set.")] = "UTC",
    prefix: Annotated[
        str | None,
        typer.Option(help="What stands before the number, with {tenant} and {period}: [{tenant}-{period}-]"),
    ] = None,
    padding: Annotated[int, typer.Option(help="How many digits a number has; 0: as many as it needs.")] = 4,
    quick: Annotated[
        bool, typer.Option("--quick", help="Numbers may be missing; nobody waits for another's COMMIT.")
    ] = False,
    keep_days: Annotated[
        int, typer.Option(help="How many days before a tenant's newest period others are kept.")
    ] = 400,
) -> None:
    """Define a kind of numbers in every shard, or change how they are written. Idempotent."""
    from shardids.catalog.counters import CounterKind
    from shardids.tables import counters

    wanted = CounterKind(
        name=kind, per=per, zone=zone, prefix=prefix, padding=padding, gapless=not quick, keep_days=keep_days
    )
    there = run.catalog
    shards = counters.define(there, wanted, dry_run=run.dry)
    verb = "would be" if run.dry else "are"
    out.print(f'Numbers of kind "{kind}" {verb} defined in {counted(shards, "shard")}')


@app.command()
@takes("catalog", "json")
def show(
    run: Run,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Also older periods.")] = False,
    changes: Annotated[
        bool, typer.Option("--changes", help="How counters were set by hand: when, by whom and why.")
    ] = False,
) -> None:
    """List the counters of all shards, each tenant's newest periods, and the highest number of each."""
    from shardids.tables import counters

    if changes:
        refuse("to --changes", kind=kind, all=whole)
        rows = [
            asdict(one) | {"period": one.period.isoformat(), "changed_at": one.changed_at.isoformat()}
            for one in counters.changes(run.catalog, tenant=tenant)
        ]
        run.print_rows(rows, empty="No counter was set by hand.")
        return
    found = counters.listed(run.catalog, tenant=tenant, kind=kind, whole=whole)
    rows = [asdict(one) | {"period": _shown(one.per, one.period)} for one in found]
    run.print_rows(rows, empty="There are no such counters.")


@app.command("set", context_settings={"ignore_unknown_options": True})
@takes("catalog", "dry-run", "yes")
def set_number(
    run: Run,
    tenant: TenantArgument,
    kind: KindArgument,
    number: Annotated[
        str, typer.Argument(metavar="NUMBER|+COUNT", help="The next number, or how many to leave out.")
    ],
    reason: ReasonOption,
    again: Annotated[
        bool, typer.Option("--again", help="Allow numbers that were already issued to be issued again.")
    ] = False,
    period: PeriodOption = None,
    shard: ShardOption = None,
) -> None:
    """Set the next number of a counter, and record why. Waits for transactions that are drawing.

    To let it begin again: 1 --again. To leave the next ten numbers out: +10
    """
    from shardids.tables import counters

    value, day = _number(number), _day(period)
    if number.startswith("+"):
        refuse("to +COUNT, which issues no number again", again=again)
        done = counters.skip(
            run.catalog,
            tenant=tenant,
            kind=kind,
            count=value,
            reason=reason,
            period=day,
            shard=shard,
            dry_run=run.dry,
        )
    else:
        if again:
            run.ask(f'Numbers of kind "{kind}" of tenant "{tenant}" from {value} on may come twice. Go on?')
        done = counters.set_next(
            run.catalog,
            tenant=tenant,
            kind=kind,
            number=value,
            reason=reason,
            again=again,
            period=day,
            shard=shard,
            dry_run=run.dry,
        )
    verb = "would be" if run.dry else "is"
    out.print(
        f'The next number of kind "{done.kind}" of tenant "{done.tenant}" in shard {done.shard} {verb}'
        f" {done.next_number}; the highest so far is {done.highest_before}"
    )


@app.command()
@takes("catalog", "dry-run")
def zone(
    run: Run,
    tenant: TenantArgument,
    name: Annotated[str, typer.Argument(help="The time zone, such as Europe/Berlin.")],
    shard: ShardOption = None,
) -> None:
    """Set a tenant's time zone, which decides when its periods end."""
    from shardids.tables import counters

    there = run.catalog
    found = counters.set_zone(there, tenant=tenant, zone=name, shard=shard, dry_run=run.dry)
    verb = "would count" if run.dry else "counts"
    out.print(f'Tenant "{tenant}", shard {found}: {verb} days in {name}')


def _shown(per: str, period: date) -> str:
    return {"day": f"{period:%Y-%m-%d}", "month": f"{period:%Y-%m}", "year": f"{period:%Y}"}.get(per, "")


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise BadArgument(f"{text!r} is not a day", hint="Write it as 2026-11-22.") from None


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"{text!r} is not a number", hint="For example: 1000, or +10") from None
