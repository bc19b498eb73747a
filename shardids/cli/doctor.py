"""``shardids doctor``: examines the cluster and prints the findings."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich.text import Text

from shardids import doctor, lookups
from shardids.catalog.notation import shown_shards
from shardids.cli.common import CatalogOption, JsonOption, opened, print_json
from shardids.cli.output import err, out, print_rows
from shardids.doctor.findings import Finding, Severity
from shardids.doctor.samples import ShardingKey, keys_of
from shardids.errors import BadArgument
from shardids.migrate.scaffold import load_metadata

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
_SOMETHING_IS_WRONG = 3


def _list(wanted: bool) -> None:
    if wanted:
        rows = [
            {"check": check.name, "severity": str(check.severity), "finds": check.finds}
            for check in doctor.CHECKS
        ]
        print_rows(rows, as_json=False, empty="")
        raise typer.Exit


def examine(
    catalog: CatalogOption,
    checks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these checks, separated by commas.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.COLUMN",
            help="A column that rows are sharded by: rows must be where its hash says. Repeatable.",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="PACKAGE.MODULE:BASE", help="The same for all sharding keys of these models."),
    ] = None,
    every_row: Annotated[
        bool,
        typer.Option(
            "--every-row", help="Read every row of the tables with such keys and of look-ups, not a sample."
        ),
    ] = False,
    as_json: JsonOption = False,
    _list_wanted: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the checks, and do nothing.")
    ] = False,
) -> None:
    """Find what is wrong with the cluster, and say what to do. Changes nothing; exits 3 if something is."""
    names = None if checks is None else [name.strip() for name in checks.split(",")]
    keys = [ShardingKey.parse(one) for one in key or ()]
    if models is not None:
        keys += [one for one in keys_of(load_metadata(models)[0]) if one not in keys]
    with opened(catalog) as there, err.status("Asking all nodes"):
        if every_row and not keys and not lookups.listed(there):
            raise BadArgument(
                "--every-row is for sharding keys and look-ups, and the cluster has no look-up",
                hint="Name sharding keys with --key or --models.",
            )
        report = doctor.examine(there, names, keys, every_row=every_row)
    if as_json:
        print_json(_as_json(report))
    else:
        for finding in report.findings:
            _show(finding)
        out.print(_summary(report), markup=False)
    if not report.is_well:
        raise typer.Exit(_SOMETHING_IS_WRONG)


def _as_json(report: doctor.Report) -> dict[str, object]:
    return {
        "well": report.is_well,
        "seconds": round(report.seconds, 3),
        "nodes": list(report.facts.nodes),
        "shards": len(report.facts.placed),
        "checks": report.checks,
        "findings": [asdict(finding) for finding in report.findings],
    }


def _show(finding: Finding) -> None:
    head = Text.assemble((finding.severity, _STYLES[finding.severity]), " ", (finding.check, "bold"))
    where = [f'node "{node}"' for node in finding.nodes]
    where += [f"shards {shown_shards(finding.shards)}"] if finding.shards else []
    where += [finding.thing] if finding.thing else []
    head.append("  " + ", ".join(where), "dim")
    out.print(head)
    out.print(f"  {finding.what}", markup=False)
    for line in finding.to_do.splitlines():
        out.print(f"  → {line}", markup=False, style="cyan")
    for place, commands in groupby(finding.commands, lambda command: command.place):
        out.print(f"  {place}:", style="dim", markup=False)
        for command in commands:
            # The command stands alone on its line, without line breaks, so that it can be pasted.
            out.print(f"    {command.text}", markup=False, style="cyan", soft_wrap=True)


def _summary(report: doctor.Report) -> str:
    wrong = sum(finding.severity is not Severity.INFO for finding in report.findings)
    layout = report.facts.description.layout
    return (
        f"{wrong or 'Nothing'} wrong: {len(report.checks)} checks of {len(report.facts.nodes)} nodes and"
        f" {len(report.facts.placed):,} shards in {report.seconds:.1f} s; the layout lasts until"
        f" {layout.last_time:%Y-%m-%d}"
    )
