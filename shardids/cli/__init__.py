"""The command ``shardids``: each command parses its arguments, calls the package and prints the result.

``COMMANDS`` lists all commands. The module of a command is imported when that command is used.
"""

from typing import Annotated, Any, Literal

import typer

import shardids
from shardids.cli.common import ErrorsAsMessages, print_escapes
from shardids.cli.lazy import Entry, LazyGroup

COMMANDS = {
    "init": Entry("clusters:init", "Create the catalog of a new cluster. Idempotent."),
    "grant": Entry(
        "clusters:grant", "Let an application role draw IDs: draw, reserve and decode, nothing else."
    ),
    "upgrade": Entry(
        "upgrade:upgrade",
        "Bring shardids' own objects to this version: the catalog, the nodes, then the shards.",
    ),
    "doctor": Entry(
        "doctor:examine",
        "Find what is wrong with the cluster, and say what to do. Changes nothing; exits 3 if something is.",
    ),
    "metrics": Entry("metrics:app", "What Prometheus asks for: metrics, alert rules, a dashboard."),
    "console": Entry(
        "console:console",
        "Serve a page that shows the cluster: health, rates, the map of shards, IDs, moves. Reads only.",
    ),
    "validate-config": Entry(
        "configuration:validate_config",
        "Say whether catalog, layout, nodes, migrations and models can be used; exit 1 if not.",
    ),
    "load": Entry(
        "load:load",
        "Load a CSV or Parquet file by COPY, each row into its shard; run again, it goes on where it ended.",
    ),
    "rebalance": Entry(
        "moves:rebalance", "Move shards, one after another, until all nodes carry about the same."
    ),
    "compare": Entry(
        "compare:compare",
        "Measure all key schemes side by side, on servers of this machine that are started for it.",
    ),
    "demo": Entry(
        "dev:demo",
        "Run two servers with 64 shards, write 6,000 rows through SQLAlchemy, and show what their IDs say.",
    ),
    "node": Entry("groups:node_app", "The PostgreSQL databases that hold shards."),
    "shard": Entry("groups:shard_app", "The logical shards."),
    "region": Entry("regions:app", "Names for ranges of shards, which live on nodes of their region alone."),
    "migrate": Entry("migrate:app", "Change the tables of every shard, with Alembic."),
    "transaction": Entry("transactions:app", "Transactions on several nodes that were not ended."),
    "restore-point": Entry(
        "restore_points:restore_point",
        "Mark a moment on all servers to which they can be restored together.",
    ),
    "adopt": Entry("adopt:app", "Take an existing PostgreSQL database into shards."),
    "reference": Entry(
        "references:app",
        "Small tables with the same rows on every node, which rows of all shards can refer to.",
    ),
    "query-node": Entry("query_node:app", "The database whose views show the rows of all shards."),
    "counter": Entry("counters:app", "Numbers for people, which begin again each day, month or year."),
    "lookup": Entry("lookups:app", "Columns that are unique over all shards, and find a row's shard."),
    "plan": Entry(
        "plan:plan",
        "Plan widths, shards and nodes for a load, or say with --layout whether one fits it. Asks no server.",
    ),
    "id": Entry("ids:app", "Take IDs apart, put them together, draw them."),
    "sql": Entry("sql:app", "Read the SQL that shardids installs."),
    "dev": Entry("dev:app", "A cluster of embedded servers in a folder, to play with."),
    "baseline": Entry("baseline:app", "The key schemes that shardids is compared with."),
}
"""Commands and groups of commands, in the order of ``--help``."""


LogFormat = Literal["text", "json"]


class _Shardids(ErrorsAsMessages, LazyGroup):
    entries = COMMANDS

    def main(self, *args: Any, **options: Any) -> Any:
        print_escapes()
        return super().main(*args, **options)


app = typer.Typer(
    name="shardids",
    cls=_Shardids,
    help="64-bit IDs born inside PostgreSQL shards, and the cluster around them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Tracebacks are for developers: plain, and without the values of variables.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardids {shardids.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            help="Log steps and changes of state to stderr; -vv: statements, too.",
        ),
    ] = 0,
    log_format: Annotated[LogFormat, typer.Option(help="How records are written.")] = "text",
) -> None:
    from shardids.cli.logs import set_up

    set_up(verbose, as_json=log_format == "json")
