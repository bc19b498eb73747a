"""``shardids counter``: kinds of numbers for people, and their counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Annotated, Any, cast

import typer

from shardids import counters
from shardids.catalog.counters import CounterKind, Period
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, YesOption, confirm, opened
from shardids.cli.output import out, print_rows
from shardids.counters import Change
from shardids.errors import BadArgument

app = typer.Typer(help="Numbers for people, which begin again each day, month or year.", no_args_is_help=True)

TenantArgument = Annotated[str, typer.Argument(help="The tenant, as the rows' column has it, as text.")]
KindArgument = Annotated[str, typer.Argument(help="The kind of numbers.")]
ShardOption = Annotated[
    int | None, typer.Option(help="The tenant's shard; by default the one where it has numbers.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; it is recorded with your name.")]
PeriodOption = Annotated[
    str | None,
    typer.Option(
        metavar="DATE", help="A day of the counter's period (YYYY-MM-DD); by default the present one."
    ),
]


@app.command()
def define(
    catalog: CatalogOption,
    kind: KindArgument,
    per: Annotated[str, typer.Option(help="When its counters begin again: day, month, year or never.")],
    zone: Annotated[str, typer.Option(help="The time zone of tenants without one of their own.")] = "UTC",
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
    dry_run: DryRunOption = False,
) -> None:
    """Define a kind of numbers in every shard, or change how they are written. Idempotent."""
    wanted = CounterKind(
        name=kind,
        per=cast("Period", per),
        zone=zone,
        prefix=prefix,
        padding=padding,
        gapless=not quick,
        keep_days=keep_days,
    )
    with opened(catalog) as there:
        shards = counters.define(there, wanted, dry_run=dry_run)
    verb = "would be" if dry_run else "are"
    out.print(f'Numbers of kind "{kind}" {verb} defined in {shards} shards', markup=False)


@app.command()
def show(
    catalog: CatalogOption,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    kind: Annotated[str | None, typer.Option(help="Of this kind alone.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="With older periods, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the counters of all shards, each tenant's newest periods, and the highest number of each."""
    with opened(catalog) as there:
        found = counters.listed(there, tenant=tenant, kind=kind, whole=whole)
    rows = [asdict(one) | {"period": _shown(one.per, one.period)} for one in found]
    print_rows(rows, as_json=as_json, empty="There are no such counters.")


@app.command("set")
def set_number(
    catalog: CatalogOption,
    tenant: TenantArgument,
    kind: KindArgument,
    number: Annotated[int, typer.Argument(help="The next number.")],
    reason: ReasonOption,
    again: Annotated[
        bool, typer.Option("--again", help="Although numbers that were issued would be issued again.")
    ] = False,
    period: PeriodOption = None,
    shard: ShardOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Set the next number of a counter, and record why. Waits for transactions that are drawing."""
    if again and not dry_run:
        confirm(
            f'Numbers of kind "{kind}" of tenant "{tenant}" from {number} on may come twice. Go on?', yes=yes
        )
    with opened(catalog) as there:
        done = counters.set_next(
            there,
            tenant=tenant,
            kind=kind,
            number=number,
            reason=reason,
            again=again,
            period=_day(period),
            shard=shard,
            dry_run=dry_run,
        )
    _report(done, dry_run)


@app.command()
def reset(
    catalog: CatalogOption,
    tenant: TenantArgument,
    kind: KindArgument,
    reason: ReasonOption,
    period: PeriodOption = None,
    shard: ShardOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Let a counter begin again at 1, and record why: its numbers will come a second time."""
    set_number(catalog, tenant, kind, 1, reason, True, period, shard, dry_run, yes)


@app.command()
def skip(
    catalog: CatalogOption,
    tenant: TenantArgument,
    kind: KindArgument,
    count: Annotated[int, typer.Argument(help="How many numbers to leave out.")],
    reason: ReasonOption,
    period: PeriodOption = None,
    shard: ShardOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Leave the next numbers of a counter out, and record why."""
    with opened(catalog) as there:
        done = counters.skip(
            there,
            tenant=tenant,
            kind=kind,
            count=count,
            reason=reason,
            period=_day(period),
            shard=shard,
            dry_run=dry_run,
        )
    _report(done, dry_run)


@app.command()
def zone(
    catalog: CatalogOption,
    tenant: TenantArgument,
    name: Annotated[str, typer.Argument(help="The time zone, such as Europe/Berlin.")],
    shard: ShardOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Give a tenant a time zone of its own, which decides when its periods end."""
    with opened(catalog) as there:
        found = counters.set_zone(there, tenant=tenant, zone=name, shard=shard, dry_run=dry_run)
    verb = "would count" if dry_run else "counts"
    out.print(f'Tenant "{tenant}", shard {found}: {verb} days in {name}', markup=False)


@app.command()
def changes(
    catalog: CatalogOption,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List how counters were set by hand: when, by whom and why."""
    with opened(catalog) as there:
        found = counters.changes(there, tenant=tenant)
    print_rows(_rows(found), as_json=as_json, empty="No counter was set by hand.")


def _rows(found: Sequence[Change]) -> list[dict[str, Any]]:
    return [
        asdict(one) | {"period": one.period.isoformat(), "changed_at": one.changed_at.isoformat()}
        for one in found
    ]


def _shown(per: str, period: date) -> str:
    return {"day": f"{period:%Y-%m-%d}", "month": f"{period:%Y-%m}", "year": f"{period:%Y}"}.get(per, "")


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise BadArgument(f"{text!r} is not a day", hint="Write it as 2026-11-22.") from None


def _report(done: Change, dry_run: bool) -> None:
    verb = "would be" if dry_run else "is"
    out.print(
        f'The next number of kind "{done.kind}" of tenant "{done.tenant}" in shard {done.shard} {verb}'
        f" {done.next_number}; the highest so far is {done.highest_before}",
        markup=False,
    )
