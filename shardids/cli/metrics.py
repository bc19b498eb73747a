"""``shardids metrics``: what Prometheus asks for."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardids.cli.common import CatalogOption
from shardids.cli.output import err, print_warnings
from shardids.errors import BadArgument

app = typer.Typer(help="What Prometheus asks for: metrics, alert rules, a dashboard.", no_args_is_help=True)


@app.command()
def serve(
    catalog: CatalogOption,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen. Whoever reaches it can read node names, shard numbers and rates.",
        ),
    ] = "127.0.0.1:9187",
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name that Prometheus asks it by, besides addresses; repeatable."
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
    top: Annotated[
        int, typer.Option(metavar="N", help="Shards of a node with series of their own, by rate and by lead.")
    ] = 20,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the catalog and the nodes.")
    ] = 5.0,
) -> None:
    """Serve the metrics of the cluster to Prometheus, at /metrics. Writes nothing on any node."""
    if textfile is not None and not once:
        raise BadArgument("--textfile is for --once", hint="Run it again and again, from cron for example.")
    # The first of these says which extra is missing.
    from shardids.metrics import ClusterCollector  # isort: skip
    from shardids.metrics import serving
    from shardids.serving.addresses import Address

    address = Address.parse(listen)
    collector = ClusterCollector(catalog, top=top, timeout_s=timeout, totals=not once)
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
                on_start=lambda at: err.print(f"Serving http://{at}/metrics", markup=False),
            )
    finally:
        collector.close()


@app.command()
def alerts() -> None:
    """Print alert rules for these metrics, as Prometheus loads them."""
    _print_file("alerts.yaml")


@app.command()
def dashboard() -> None:
    """Print a dashboard of these metrics, as Grafana imports it."""
    _print_file("dashboard.json")


def _print_file(name: str) -> None:
    typer.echo((files("shardids.metrics") / name).read_text(encoding="utf-8"), nl=False)
