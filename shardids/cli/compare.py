"""``shardids compare`` and ``multimaster``: the key schemes that shardids is compared with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.printing import err, out, print_json
from shardids.errors import BadArgument, ClusterConflict
from shardids.pg.notation import counted

if TYPE_CHECKING:
    from shardids.compare.multimaster import OffsetFinding, OffsetStep
    from shardids.compare.multimaster.fleet import Fleet
    from shardids.compare.results import Comparison


@takes("json")
def compare(
    run: Run,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute instead of ten; the figures are rough.")
    ] = False,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only these; --list names them.", show_default="all"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a report with charts.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the tables as Markdown.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Measure nothing: list the schemes, and what each is safe under.")
    ] = False,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Measure nothing: report an earlier --json."),
    ] = None,
) -> None:
    """Measure all key schemes side by side, on servers of this machine that are started for it.

    Draws, inserts, storage, order, and duplicates at full speed, when clocks step back and when
    servers are killed, lost or added. Takes two cores and some gigabytes of disk for some minutes; Ctrl-C
    ends all servers and removes their files.
    """
    from shardids.compare import results
    from shardids.compare.report import page, table

    if listed:
        refuse("to --list", quick=quick, schemes=schemes, html=html, markdown=markdown, load=load)
        _list_schemes(run)
        return
    if load is not None:
        refuse("to --load, which measures nothing", quick=quick, schemes=schemes)
    files = [file for file in (html, markdown) if file is not None]
    for file in files:
        _check_writable(file)
    if html is not None:
        page.check_libraries()
    if run.as_json or load is not None:
        results.check_libraries()
    comparison = _loaded(load) if load else _measured(schemes, quick=quick)
    if run.as_json:
        typer.echo(results.to_json(comparison))
    else:
        table.print_table(comparison, out.console)
    if html is not None:
        html.write_text(page.html(comparison), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(table.markdown(comparison), encoding="utf-8")
    for file in files:
        err.print(f"Written: {file}")


def _measured(schemes: str | None, *, quick: bool) -> Comparison:
    from shardids.compare.run import compare as measure

    names = [name.strip() for name in schemes.split(",")] if schemes is not None else []
    command = shlex.join(["shardids", *sys.argv[1:]])
    with err.status("") as status:
        return measure(names, quick=quick, command=command, say=status.update)


def _loaded(file: Path) -> Comparison:
    from shardids.compare import results

    try:
        return results.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"{file} can't be read: {error}") from error


def _check_writable(file: Path) -> None:
    # Fails before minutes of measuring, not after.
    place = file if file.exists() else file.parent
    if not (place.exists() and os.access(place, os.W_OK)):
        raise BadArgument(f"{file} can't be written", hint="Name a file in a folder that you may write to.")


_DRIFT_FOUND = 3

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
_HEADROOM = 10_000
"""The HEADROOM of the plan, which a help text does not load."""


def _list_schemes(run: Run) -> None:
    from shardids.compare.schemes import SCHEMES

    abouts = [scheme.about for scheme in SCHEMES.values()]
    if run.as_json:
        print_json([asdict(about) for about in abouts])
        return
    for about in abouts:
        out.print(f"[bold]{about.name}[/]  {about.title}", markup=True)
        for title, words in (
            ("safe under", about.safe_under),
            ("not under", about.unsafe_under),
            ("stops", about.stops),
            ("a key tells", about.tells),
        ):
            out.print(f"{title:>13}  {words}")


@takes("dry-run", "yes", "json")
def multimaster(
    run: Run,
    masters: MastersOption,
    new: Annotated[
        list[str] | None,
        typer.Option(
            "--new",
            metavar="NAME=URL",
            help="A master to be added, which may write afterwards; it has the tables and the rows, and takes"
            " no writes yet. Repeatable.",
        ),
    ] = None,
    leaving: Annotated[
        list[str] | None,
        typer.Option(
            "--leaving",
            metavar="NAME=URL",
            help="A master that leaves the others and takes no writes afterwards. Repeatable.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Find missing and wrong offsets, and sequences behind their tables; exit 3 if any.",
        ),
    ] = False,
    schemas: SchemasOption = None,
    headroom: HeadroomOption = _HEADROOM,
) -> None:
    """Give every master of a group its own auto-increment offset: k masters, each counting by k.

    They are servers of PostgreSQL or MariaDB. PostgreSQL masters keep writing meanwhile. A single master
    counts by 1 again. Idempotent; --dry-run shows the steps and their locks.
    """
    from shardids.compare.multimaster.fleet import parse_fleet

    if verify:
        given = headroom != _HEADROOM
        refuse("to --verify", new=new, leaving=leaving, headroom=given, dry_run=run.dry, yes=run.yes)
    named = [*masters, *(new or ())]
    fleet = parse_fleet(named, leaving=leaving or (), schemas=schemas or (), headroom=headroom)
    if verify:
        _verify(run, fleet)
        return
    if new and len(masters) > 1:
        present = parse_fleet(masters, schemas=schemas or (), headroom=headroom)
        _refuse_faults(present.verify())
    _carry_out(run, fleet, len(named) + len(leaving or ()))


def _verify(run: Run, fleet: Fleet) -> None:
    findings = fleet.verify()
    if run.as_json or findings:
        run.print_rows([asdict(finding) for finding in findings])
    else:
        out.print(f"No faults found: {_described(fleet)}")
    if findings:
        raise typer.Exit(_DRIFT_FOUND)


def _refuse_faults(findings: Sequence[OffsetFinding]) -> None:
    # A plan works from any state, but nobody should add masters to a fleet whose faults they do not know of.
    serious = [finding for finding in findings if finding.problem != "no-sequence"]
    if serious:
        first = serious[0]
        raise ClusterConflict(
            f"the masters have {counted(len(serious), 'fault')}; the first: {first.column} on"
            f' master "{first.master}" {first.detail}',
            hint="See: shardids multimaster --verify. Repair them without --new, then add masters.",
        )


def _carry_out(run: Run, fleet: Fleet, named: int) -> None:
    steps = fleet.plan()
    if steps and (increment := fleet.counted()) > named:
        run.ask(
            f"A master counts by {increment}, and {named} {'is' if named == 1 else 'are'} named: if another"
            " takes writes, name it with --leaving, or keys come twice. Do all others take no writes?"
        )
    if run.dry:
        _print_steps(run, steps)
        return
    fleet.carry_out(steps, _say)
    if run.as_json:
        print_json([asdict(step) for step in steps])
    else:
        out.print(
            f"{counted(len(steps), 'step') + ' taken' if steps else 'Nothing to do'}: {_described(fleet)}"
        )
    for finding in fleet.verify():
        err.print(f'{finding.column} on master "{finding.master}": {finding.detail}')
    if any(step.phase == "switch" for step in steps):
        for name, text in fleet.options().items():
            err.print(f'\nFor the option file of master "{name}", before its next start:\n{text}')


def _described(fleet: Fleet) -> str:
    if fleet.size == 1:
        return "one master, counting by 1"
    return f"{fleet.size} masters, each counting by {fleet.size} from its own offset"


def _say(step: OffsetStep) -> None:
    err.print(f'{step.phase} on master "{step.master}": {step.column}')


def _print_steps(run: Run, steps: Sequence[OffsetStep]) -> None:
    run.print_rows([asdict(step) for step in steps], empty="Nothing to do: all masters have their offsets.")
    if steps and not run.as_json:
        err.print(
            "\nA phase ends on all masters before the next begins. New masters take no writes before the end."
        )
