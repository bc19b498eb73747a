"""``shardids baseline``: lists the alternatives to shardids, and manages the one that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from shardids.cli.common import DryRunOption, JsonOption, print_json
from shardids.cli.output import err, out, print_rows
from shardids.compare.schemes import SCHEMES
from shardids.errors import ClusterConflict
from shardids.multimaster import HEADROOM, OffsetFinding, OffsetStep
from shardids.multimaster.fleet import Fleet, parse_fleet

app = typer.Typer(help="The key schemes that shardids is compared with.", no_args_is_help=True)
multimaster_app = typer.Typer(
    help="Auto-increment offsets on several masters, PostgreSQL or MariaDB: k of them, each counting by k"
    " from its own offset.",
    no_args_is_help=True,
)
app.add_typer(multimaster_app, name="multimaster")

DRIFT_FOUND = 3

MastersOption = Annotated[
    list[str],
    typer.Option(
        "--master",
        metavar="NAME=URL",
        help="A master that takes writes; once for each, in the order of their offsets, always the same.",
    ),
]
SchemasOption = Annotated[
    list[str] | None,
    typer.Option("--schema", metavar="NAME", help="PostgreSQL: only tables of this schema; repeatable."),
]
HeadroomOption = Annotated[
    int,
    typer.Option(help="PostgreSQL: values that masters may still draw between the plan and their switch."),
]


@app.command("list")
def list_schemes(as_json: JsonOption = False) -> None:
    """List the schemes, and what each is safe under."""
    abouts = [scheme.about for scheme in SCHEMES.values()]
    if as_json:
        print_json([asdict(about) for about in abouts])
        return
    for about in abouts:
        out.print(f"[bold]{about.name}[/]  {about.title}")
        for title, words in (
            ("safe under", about.safe_under),
            ("not under", about.unsafe_under),
            ("stops", about.stops),
            ("a key tells", about.tells),
        ):
            out.print(f"{title:>13}  {words}", markup=False)


@multimaster_app.command()
def plan(
    masters: MastersOption,
    schemas: SchemasOption = None,
    headroom: HeadroomOption = HEADROOM,
    as_json: JsonOption = False,
) -> None:
    """Show the steps that give every master its offsets, and their locks. Changes nothing."""
    fleet = parse_fleet(masters, schemas=schemas or (), headroom=headroom)
    _print_steps(fleet.plan(), as_json=as_json)


@multimaster_app.command()
def apply(
    masters: MastersOption,
    schemas: SchemasOption = None,
    headroom: HeadroomOption = HEADROOM,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give every master its offsets. PostgreSQL masters keep writing meanwhile. Idempotent."""
    fleet = parse_fleet(masters, schemas=schemas or (), headroom=headroom)
    _carry_out(fleet, dry_run=dry_run, as_json=as_json)


@multimaster_app.command()
def verify(masters: MastersOption, schemas: SchemasOption = None, as_json: JsonOption = False) -> None:
    """Find missing and wrong offsets, and sequences behind their tables. Exits 3 if there are any."""
    fleet = parse_fleet(masters, schemas=schemas or (), headroom=HEADROOM)
    findings = fleet.verify()
    if as_json or findings:
        print_rows([asdict(finding) for finding in findings], as_json=as_json, empty="")
    else:
        out.print(f"No faults found: {fleet.size} masters, each counting by {fleet.size} from its own offset")
    if findings:
        raise typer.Exit(DRIFT_FOUND)


@multimaster_app.command()
def grow(
    masters: MastersOption,
    new: Annotated[
        list[str],
        typer.Option(
            "--new",
            metavar="NAME=URL",
            help="A master to be added; it has the tables and the rows, and takes no writes yet.",
        ),
    ],
    schemas: SchemasOption = None,
    headroom: HeadroomOption = HEADROOM,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make room for more masters, which may write afterwards. PostgreSQL masters keep writing meanwhile."""
    fleet = parse_fleet([*masters, *new], schemas=schemas or (), headroom=headroom)
    if len(masters) > 1:
        present = parse_fleet(masters, schemas=schemas or (), headroom=headroom)
        _refuse_faults(present.verify())
    _carry_out(fleet, dry_run=dry_run, as_json=as_json)


def _refuse_faults(findings: Sequence[OffsetFinding]) -> None:
    # A plan works from any state, but nobody should add masters to a fleet whose faults they do not know of.
    serious = [finding for finding in findings if finding.problem != "no-sequence"]
    if serious:
        first = serious[0]
        raise ClusterConflict(
            f"the masters have {len(serious)} faults; the first: {first.column} on"
            f' master "{first.master}" {first.detail}',
            hint="See: shardids baseline multimaster verify. Repair them with apply, then grow.",
        )


def _carry_out(fleet: Fleet, *, dry_run: bool, as_json: bool) -> None:
    steps = fleet.plan()
    if dry_run:
        _print_steps(steps, as_json=as_json)
        return
    fleet.carry_out(steps, _say)
    if as_json:
        print_json([asdict(step) for step in steps])
    else:
        done = f"{len(steps)} steps taken" if steps else "Nothing to do"
        out.print(f"{done}: {fleet.size} masters, each counting by {fleet.size} from its own offset")
    for finding in fleet.verify():
        err.print(f'{finding.column} on master "{finding.master}": {finding.detail}', markup=False)


def _say(step: OffsetStep) -> None:
    err.print(f'{step.phase} on master "{step.master}": {step.column}', markup=False)


def _print_steps(steps: Sequence[OffsetStep], *, as_json: bool) -> None:
    print_rows(
        [asdict(step) for step in steps],
        as_json=as_json,
        empty="Nothing to do: all masters have their offsets.",
    )
    if steps and not as_json:
        err.print(
            "\nA phase ends on all masters before the next begins. New masters take no writes before the end."
        )
