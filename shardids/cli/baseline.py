"""``shardids baseline``: the alternatives to shardids, and the one of them that needs to be managed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from shardids.baselines import SCHEMES, multimaster
from shardids.baselines.multimaster import HEADROOM, Finding, Master, MasterState, Plan, Step
from shardids.cli.common import DryRunOption, JsonOption, err, out, print_json, print_rows
from shardids.errors import BadArgument, ClusterConflict

app = typer.Typer(help="The key schemes that shardids is compared with.", no_args_is_help=True)
multimaster_app = typer.Typer(
    help="Auto-increment offsets on several masters: k of them, each counting by k from its own offset.",
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
    typer.Option("--schema", metavar="NAME", help="Only tables of this schema; may be repeated."),
]
HeadroomOption = Annotated[
    int, typer.Option(help="Values that masters may still draw between the plan and their switch.")
]


@app.command("list")
def list_schemes(as_json: JsonOption = False) -> None:
    """The schemes, and what each is safe under."""
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
    """The steps that would give every master its offsets, and their locks. Changes nothing."""
    states = _read(parse_masters(masters), schemas)
    _print_plan(multimaster.make_plan(states, headroom), as_json=as_json)


@multimaster_app.command()
def apply(
    masters: MastersOption,
    schemas: SchemasOption = None,
    headroom: HeadroomOption = HEADROOM,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give every master its offsets, while they go on writing. Repeating it is no error."""
    there = parse_masters(masters)
    _carry_out(there, _read(there, schemas), headroom, dry_run=dry_run, as_json=as_json)


@multimaster_app.command()
def verify(masters: MastersOption, schemas: SchemasOption = None, as_json: JsonOption = False) -> None:
    """Find missing and wrong offsets, and sequences behind their tables. Exits 3 if there are any."""
    findings = multimaster.verify(_read(parse_masters(masters), schemas))
    _print_findings(findings, len(masters), as_json=as_json)


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
    """Make room for more masters, while the present ones go on writing; then the new ones may."""
    present = parse_masters(masters)
    if len(present) > 1:
        _refuse_faults(multimaster.verify(_read(present, schemas)))
    grown = [*present, *parse_masters(new)]
    _carry_out(grown, _read(grown, schemas), headroom, dry_run=dry_run, as_json=as_json)


def parse_masters(words: Sequence[str]) -> list[Master]:
    """Masters from ``NAME=URL``.

    Raises:
        BadArgument: one can't be read. The message does not repeat it, as a URL may hold a password.
    """
    masters = []
    for number, word in enumerate(words, 1):
        name, equals, url = word.partition("=")
        if not equals or not url:
            raise BadArgument(
                f"master {number} is not of the form NAME=URL",
                hint="For example: --master a=postgresql://user@host:5432/database",
            )
        masters.append(Master(name=name, url=url))
    return masters


def _read(masters: Sequence[Master], schemas: Sequence[str] | None) -> list[MasterState]:
    with err.status("reading the masters"):
        return multimaster.read_masters(masters, schemas or ())


def _refuse_faults(findings: Sequence[Finding]) -> None:
    # A plan would work from any state; but whoever does not know of a fault should not add masters to it.
    serious = [finding for finding in findings if finding.problem != "no-sequence"]
    if serious:
        first = serious[0]
        raise ClusterConflict(
            f"the masters have {len(serious)} faults; the first: {first.column} on"
            f' master "{first.master}" {first.detail}',
            hint="See: shardids baseline multimaster verify. Repair them with apply, then grow.",
        )


def _carry_out(
    masters: Sequence[Master],
    states: Sequence[MasterState],
    headroom: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    made = multimaster.make_plan(states, headroom)
    if dry_run:
        _print_plan(made, as_json=as_json)
        return
    multimaster.carry_out(masters, made.steps, _say)
    left = multimaster.verify(multimaster.read_masters(masters, _schemas(states)))
    if as_json:
        print_json({"masters": made.masters, "steps": [asdict(step) for step in made.steps]})
    else:
        done = f"{len(made.steps)} steps taken" if made.steps else "Nothing to do"
        out.print(f"{done}: {made.masters} masters, each counting by {made.masters} from its own offset")
    for finding in left:
        err.print(f'{finding.column} on master "{finding.master}": {finding.detail}', markup=False)


def _schemas(states: Sequence[MasterState]) -> list[str]:
    return sorted({counter.schema for state in states for counter in state.counters})


def _say(step: Step) -> None:
    err.print(f'{step.phase} on master "{step.master}": {step.column}', markup=False)


def _print_plan(made: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json({"masters": made.masters, "steps": [asdict(step) for step in made.steps]})
        return
    rows = [
        {"step": number, "phase": step.phase, "master": step.master, "statement": step.statement}
        for number, step in enumerate(made.steps, 1)
    ]
    print_rows(rows, as_json=False, empty="Nothing to do: all masters have their offsets.")
    if made.steps:
        err.print(f"\nEach takes {made.steps[0].locks}.")
        err.print(
            "No switch before the last fence. The masters may go on writing, new ones not before the end."
        )


def _print_findings(findings: Sequence[Finding], masters: int, *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(finding) for finding in findings])
    elif findings:
        print_rows([asdict(finding) for finding in findings], as_json=False, empty="")
    else:
        out.print(f"All right: {masters} masters, each counting by {masters} from its own offset")
    if findings:
        raise typer.Exit(DRIFT_FOUND)
