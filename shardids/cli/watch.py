"""``shardids doctor``, ``console`` and ``metrics``."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.printing import err, out, print_json, print_rows, print_warnings
from shardids.errors import BadArgument, ConnectionFailed, MissingPrivilege
from shardids.ids.layout import Layout
from shardids.pg.notation import counted, named_shards, parse_duration_ms

if TYPE_CHECKING:
    from shardids.watch import doctor
    from shardids.watch.doctor.findings import Finding
    from shardids.watch.serving import Address

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
"""How a severity of a finding looks."""
_SOMETHING_IS_WRONG = 3
_LAYOUT, _MIGRATIONS = "SHARDIDS_LAYOUT", "SHARDIDS_MIGRATIONS"


def _list(wanted: bool) -> None:
    from shardids.watch import doctor

    if wanted:
        rows = [
            {"check": check.name, "severity": str(check.severity), "finds": check.finds}
            for check in doctor.CHECKS
        ]
        print_rows(rows)
        raise typer.Exit


@takes("catalog", "json")
def examine(
    run: Run,
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
        typer.Option(
            metavar="PACKAGE.MODULE:BASE",
            help="The same for all sharding keys of these models. With --before-deploy: the models, whose IDs"
            " must be bigint.",
        ),
    ] = None,
    every_row: Annotated[
        bool,
        typer.Option(
            "--every-row", help="Read every row of the tables with such keys and of look-ups, not a sample."
        ),
    ] = False,
    before_deploy: Annotated[
        bool,
        typer.Option(
            "--before-deploy",
            help="Instead, say whether catalog, layout, nodes, migrations and models can be used.",
        ),
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            envvar=_LAYOUT,
            metavar="LAYOUT",
            help="With --before-deploy: the layout that the cluster must have.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            envvar=_MIGRATIONS,
            metavar="DIR",
            help="With --before-deploy: the folder of migrations; ./migrations, if that is one.",
        ),
    ] = None,
    _list_wanted: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the checks, and do nothing.")
    ] = False,
) -> None:
    """Find faults of the cluster, and name a remedy for each. Changes nothing; exits 3 on a fault."""
    from shardids.migrate.scaffold import load_metadata
    from shardids.tables import lookups
    from shardids.watch import doctor
    from shardids.watch.facts.rows import ShardingKey, keys_of

    if before_deploy:
        refuse("to --before-deploy", checks=checks, key=key, every_row=every_row)
        _validate(run, layout, folder, models)
        return
    # The variables of the environment are for all commands.
    refuse(
        "without --before-deploy",
        layout=layout if layout != os.environ.get(_LAYOUT) else None,
        dir=folder if str(folder) != os.environ.get(_MIGRATIONS) else None,
    )
    names = None if checks is None else [name.strip() for name in checks.split(",")]
    keys = [ShardingKey.parse(one) for one in key or ()]
    if models is not None:
        keys += [one for one in keys_of(load_metadata(models)[0]) if one not in keys]
    there = run.catalog
    with err.status("Asking all nodes"):
        if every_row and not keys and not lookups.listed(there):
            raise BadArgument(
                "--every-row is for sharding keys and look-ups, and the cluster has no look-up",
                hint="Name sharding keys with --key or --models.",
            )
        report = doctor.examine(there, names, keys, every_row=every_row)
    if run.as_json:
        print_json(_as_json(report))
    else:
        for finding in report.findings:
            _show(finding)
        out.print(_summary(report))
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
    from rich.text import Text

    head = Text.assemble((finding.severity, _STYLES[finding.severity]), " ", (finding.check, "bold"))
    where = [f'node "{node}"' for node in finding.nodes]
    where += [named_shards(finding.shards)] if finding.shards else []
    where += [finding.thing] if finding.thing else []
    head.append("  " + ", ".join(where), "dim")
    out.print(head)
    out.print(f"  {finding.what}")
    for line in finding.to_do.splitlines():
        out.print(f"  → {line}", style="cyan")
    for place, commands in groupby(finding.commands, lambda command: command.place):
        out.print(f"  {place}:", style="dim")
        for command in commands:
            if command.step:
                out.print(f"    # {command.step}:", style="dim")
            # The command stands alone on its line, without line breaks, so that it can be pasted.
            out.print(f"    {command.text}", style="cyan")


def _summary(report: doctor.Report) -> str:
    wrong = sum(finding.severity != "info" for finding in report.findings)
    layout = report.facts.description.layout
    return (
        f"{wrong or 'Nothing'} wrong: {counted(len(report.checks), 'check')} of"
        f" {counted(len(report.facts.nodes), 'node')} and"
        f" {counted(len(report.facts.placed), 'shard')} in {report.seconds:.1f} s; the layout lasts until"
        f" {layout.last_time:%Y-%m-%d}"
    )


_USUAL_FOLDER = Path("migrations")


def _validate(run: Run, layout: str | None, folder: Path | None, models: str | None) -> None:
    from shardids.watch.doctor.configuration import Configuration, validate

    if folder is None and (_USUAL_FOLDER / "env.py").is_file():
        folder = _USUAL_FOLDER
    expected = None if layout is None else Layout.parse(layout)
    there = run.catalog
    parts = validate(Configuration(catalog=there, layout=expected, migrations=folder, models=models))
    usable = all(part.usable for part in parts)
    if run.as_json:
        print_json({"usable": usable, "parts": [asdict(part) for part in parts]})
    else:
        for part in parts:
            sign = "[green]ok   [/]" if part.usable else "[bold red]wrong[/]"
            out.print(f"{sign} [bold]{part.part:<10}[/] ", markup=True, end="")
            out.print(part.what)
            if part.to_do:
                out.print(f"      → {part.to_do}", style="cyan")
    if not usable:
        raise typer.Exit(_SOMETHING_IS_WRONG)


_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@takes("catalog")
def console(
    run: Run,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address to listen on. Addresses other than loopback require a token."
        ),
    ] = "127.0.0.1:8088",
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A host name that browsers may use for the console, besides addresses; repeatable.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Require the token in this file; without it, one is generated if necessary."
        ),
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page move, rebalance and fence shards.")
    ] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            envvar="SHARDIDS_PROMETHEUS",
            metavar="URL",
            help="Take the last hour's rates from this Prometheus, which scrapes shardids metrics.",
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            min=1,
            max=300,
            metavar="SECONDS",
            help="How often the cluster is read; with over 280 shards for each second, less often.",
        ),
    ] = 5.0,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.COLUMN",
            help="A column of sharding keys: the page shows the busiest keys of a hot shard. Repeatable.",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="PACKAGE.MODULE:BASE", help="The same for all sharding keys of these models."),
    ] = None,
) -> None:
    """Serve a page that shows the cluster: health, rates, the map of shards, IDs, moves. Reads only."""
    from shardids.cli.tenants import key_columns
    from shardids.watch.console.app import Console, Settings
    from shardids.watch.console.guard import Access
    from shardids.watch.console.prometheus import Prometheus
    from shardids.watch.serving import Address, serve

    address = Address.parse(listen)
    token = _token(token_file, address)
    # One that is down may come back; a database without a catalog is another's.
    with suppress(ConnectionFailed, MissingPrivilege):
        run.catalog.describe()
    served = Console(
        Settings(
            catalog_url=run.url,
            access=Access(names=[*(host or ()), address.host], token=token),
            interval_s=interval,
            allow_actions=allow_actions,
            prometheus=None if prometheus is None else Prometheus(prometheus),
            keys=tuple(key_columns(key, models)),
        )
    )

    def tell(at: Address) -> None:
        err.print(f"Serving http://{at}")
        if token is not None and token_file is None:
            err.print(f"Its token, until it ends: {token}")
        if token_file is not None and token_file.stat().st_mode & _OTHERS:
            print_warnings([f"others may read the token in {token_file}: chmod 600 {token_file}"])
        if not at.is_loopback:
            print_warnings(
                [f"other machines may reach {at}; without TLS in front, the network sees the token"]
            )

    serve(served.app(), address, on_start=tell, before_end=served.end)
    if served.left is not None:
        print_warnings([served.left])
        raise typer.Exit(1)


def _token(file: Path | None, address: Address) -> str | None:
    """The token that is asked for; None on loopback, unless there is a file."""
    from shardids.watch.console.guard import LEAST_TOKEN

    if file is None:
        return None if address.is_loopback else secrets.token_urlsafe(24)
    token = file.read_text("utf-8").strip()
    if len(token) < LEAST_TOKEN or any(not one.isprintable() or one.isspace() for one in token):
        raise BadArgument(
            f"{file} holds no token of {LEAST_TOKEN} characters or more, without spaces",
            hint=f"Make one: (umask 077; openssl rand -hex 24 > {file})",
        )
    return token


def _print_file(name: str, max_skew: str | None) -> None:
    from importlib.resources import files

    text = (files("shardids.watch.metrics") / _FILES[name]).read_text(encoding="utf-8")
    if max_skew is not None:
        seconds = parse_duration_ms(_SKEWS.get(max_skew, max_skew)) / 1000
        if not seconds:
            raise BadArgument("--max-skew must be above 0", hint="Write 100ms, for example.")
        text = text.replace(_SKEW_RULE.format(1), _SKEW_RULE.format(f"{seconds:g}"))
    typer.echo(text, nl=False)


_SKEW_RULE: Final = "abs(shardids_clock_skew_seconds) > {} + "
_SKEWS: Final = {"tight": "100ms", "usual": "1s", "loose": "5s"}
_METRICS_AT = "127.0.0.1:9187"
_FILES = {"alerts": "alerts.yaml", "dashboard": "dashboard.json"}


@takes("catalog?")
def metrics(
    run: Run,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen. Every client there can read node names, shard numbers and rates.",
        ),
    ] = _METRICS_AT,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A host name that Prometheus may use, besides addresses; repeatable."
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics once, in Prometheus' text format, and end.")
    ] = False,
    textfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.prom",
            help="With --once: write them to this file, for node_exporter's textfile collector.",
        ),
    ] = None,
    printed: Annotated[
        Literal["alerts", "dashboard"] | None,
        typer.Option(
            "--print",
            help="Print alert rules as Prometheus loads them, or a dashboard as Grafana imports it, and end.",
        ),
    ] = None,
    max_skew: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With --print alerts: the largest difference of clocks without an alert: 250ms, 2s, or"
            " tight (100ms), usual (1s), loose (5s).",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="N", help="Shards per node with separate series, by rate and by lead.")
    ] = 20,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the catalog and the nodes.")
    ] = 5.0,
) -> None:
    """Serve the metrics of the cluster to Prometheus, at /metrics. Writes nothing on any node."""
    if printed != "alerts":
        refuse("without --print alerts", max_skew=max_skew)
    if printed is not None:
        refuse("to --print", once=once, textfile=textfile)
        _print_file(printed, max_skew)
        return
    if once:
        refuse("to --once", listen=listen != _METRICS_AT, host=host)
    elif textfile is not None:
        raise BadArgument("--textfile is for --once", hint="Run it periodically, for example from cron.")
    # The first of these says which extra is missing.
    from shardids.watch.metrics import ClusterCollector  # isort: skip
    from shardids.watch.metrics import serving
    from shardids.watch.serving import Address

    address = Address.parse(listen)
    collector = ClusterCollector(run.required_url(), top=top, timeout_s=timeout, totals=not once)
    try:
        if textfile is not None:
            serving.write(collector, textfile)
        elif once:
            typer.echo(serving.text(collector), nl=False)
        else:
            if not address.is_loopback:
                print_warnings([f"other machines may reach {address}; nothing asks who they are"])
            serving.serve(
                collector,
                address,
                names=host or (),
                on_start=lambda at: err.print(f"Serving http://{at}/metrics"),
            )
    finally:
        collector.close()
