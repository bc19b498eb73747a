"""``shardids node confirm-clock`` and ``shardids shard reset-clock``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer

from shardids import clocks
from shardids.catalog.notation import named_shards, parse_shards
from shardids.cli.common import CatalogOption, DryRunOption, YesOption, opened
from shardids.cli.common import confirm as ask
from shardids.cli.ids import parse_time
from shardids.cli.output import out, print_warnings


def confirm(name: str, catalog: CatalogOption, dry_run: DryRunOption = False) -> None:
    """Confirm that a node's clock is right, although it went ahead by more than max_step at once.

    Compares it with the clocks of the catalog, of the other nodes and of this machine. If they agree, all
    shards of the node issue IDs again.
    """
    with opened(catalog) as there:
        compared = clocks.confirm_clock(there, name, dry_run=dry_run)
    _print_comparison(compared)
    out.print(f'{"Would confirm" if dry_run else "Confirmed"} the clock of node "{name}"', markup=False)


def _print_comparison(compared: clocks.Comparison) -> None:
    for other in compared.others:
        out.print(f'The clock of node "{compared.node}" is {other}', markup=False)
    if compared.is_with_this_machine_only:
        same = "".join(f", {name}" for name in compared.same_server)
        out.print(
            f'No other server was compared: node "{compared.node}"{same} are one server'
            if same
            else "No other server was compared",
            markup=False,
        )
    _print_unreachable(compared.unreachable, "its clock was not compared")


def _print_unreachable(unreachable: Mapping[str, str], what: str) -> None:
    print_warnings(f"{name} did not answer, {what}: {reason}" for name, reason in unreachable.items())


def reset(
    shards: Annotated[str, typer.Argument(help="Numbers and ranges: 5, or 0-31,40.")],
    catalog: CatalogOption,
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="The earliest time that the wrong clock showed, if the node has not recorded it.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Bring shards back that a wrong clock took into the future.

    Each begins again max_ahead past the present, and passes over the IDs of the wrong clock when their time
    comes. Repeat it to continue after an interruption, to bring the range to nodes that did not answer, and
    to make draws quick again once the range has passed.
    """
    first = None if since is None else parse_time(since)
    with opened(catalog) as there:
        numbers = parse_shards(shards, there.describe().shard_count)
        for shard in numbers if dry_run else ():
            _print_reset(clocks.reset_clock(there, shard, since=first, dry_run=True), dry_run=True)
        if dry_run:
            return
        ask(
            f"Reset the clock of {named_shards(numbers)}? Meanwhile they issue no IDs; --dry-run shows"
            " what is passed over later.",
            yes=yes,
        )
        for shard in numbers:
            _print_reset(clocks.reset_clock(there, shard, since=first), dry_run=False)


def _print_reset(done: clocks.Reset, *, dry_run: bool) -> None:
    would, shard = "Would " if dry_run else "", f'shard {done.shard} on node "{done.node}"'
    match done.work:
        case clocks.Work.RESET:
            done_it = "reset" if dry_run else "Reset"
        case clocks.Work.ACTIVATE:
            done_it = "activate" if dry_run else "Activated"
        case clocks.Work.RELEASE:
            done_it = "make draws quick again in" if dry_run else "Made draws quick again in"
        case clocks.Work.NOTHING:
            would, done_it = "", "Nothing to do for"
    reason = {
        clocks.Work.RESET: "",
        clocks.Work.ACTIVATE: ": its clock was reset, and the command interrupted",
        clocks.Work.RELEASE: ": it has passed over the IDs of the wrong clock",
        clocks.Work.NOTHING: ": its clock was reset, and the IDs of the wrong clock are still to come",
    }[done.work]
    out.print(f"{would}{done_it} {shard}{reason}", markup=False)
    if (plan := done.plan) is not None:
        out.print(f"  lead          {plan.lead}")
        out.print(f"  begins again  {_time(plan.starts)}, max_ahead past the present")
        out.print(f"  passes over   {_time(plan.first)} to {_time(plan.last)}")
        if plan.outage is not None:
            begins, ends = plan.outage
            out.print(f"  no IDs        {_time(begins)} to {_time(ends)}: longer than max_ahead")
    _print_unreachable(
        {f'node "{name}"': reason for name, reason in done.unreachable.items()},
        "and was not looked at" if dry_run else "and lacks the range; run it again when it does",
    )


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
