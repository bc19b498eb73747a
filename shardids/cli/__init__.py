"""The command ``shardids``: each command parses its arguments, calls the package and prints the result.

``COMMANDS`` lists all commands. The module of a command is imported when that command is used.
"""

import atexit
import gc
from typing import Annotated, Any, Literal

import typer

import shardids
from shardids.cli.command import Entry, ErrorsAsMessages, LazyGroup, print_escapes

# The process ends: nothing that it has loaded is worth a collector's look.
atexit.register(gc.freeze)

BUILD, OPERATE, ADOPT = "Build a cluster", "Operate it", "Adopt a database"
LOOK, LEARN = "Look at IDs and rows", "Learn and compare"
COMMANDS = {
    "init": Entry("clusters:init", "Create the catalog of a new cluster. Idempotent.", BUILD),
    "node": Entry("nodes:app", "The PostgreSQL databases that hold shards.", BUILD),
    "shard": Entry("shards:app", "The logical shards.", BUILD),
    "region": Entry(
        "regions:app", "Names for ranges of shards, which live only on nodes of their region.", BUILD
    ),
    "migrate": Entry("migrate:app", "Change the tables of every shard, with Alembic.", BUILD),
    "grant": Entry(
        "clusters:grant", "Let an application role draw IDs: draw, reserve and decode, nothing else.", BUILD
    ),
    "reference": Entry(
        "tables.references:app",
        "Small tables with the same rows on every node, which rows of all shards can refer to.",
        BUILD,
    ),
    "lookup": Entry(
        "tables.lookups:app", "Columns that are unique over all shards, and find a row's shard.", BUILD
    ),
    "counter": Entry(
        "tables.counters:app", "Numbers for people, which begin again each day, month or year.", BUILD
    ),
    "query-node": Entry(
        "tables.query_node:app", "The database whose views show the rows of all shards.", BUILD
    ),
    "load": Entry(
        "tables.load:load",
        "Load a CSV or Parquet file by COPY, each row into its shard; run again, it goes on where it ended.",
        BUILD,
    ),
    "doctor": Entry(
        "watch:examine",
        "Find faults of the cluster, and name a remedy for each. Changes nothing; exits 3 on a fault.",
        OPERATE,
    ),
    "console": Entry(
        "watch:console",
        "Serve a page that shows the cluster: health, rates, the map of shards, IDs, moves. Reads only.",
        OPERATE,
    ),
    "metrics": Entry(
        "watch:metrics",
        "Serve the metrics of the cluster to Prometheus, at /metrics. Writes nothing on any node.",
        OPERATE,
    ),
    "routes": Entry(
        "beside:routes",
        "Print the addresses of all shards, as PgBouncer, PgDog or HAProxy read them.",
        OPERATE,
    ),
    "cdc": Entry(
        "beside:cdc",
        "Change capture: the changes of all shards, as logical replication streams them.",
        OPERATE,
    ),
    "rebalance": Entry(
        "rebalance:rebalance",
        "Move shards, one after another, until all nodes carry about the same.",
        OPERATE,
    ),
    "tenant": Entry(
        "tenants:app",
        "Keys with their rows: show where they live and how large they are, and move one to another shard.",
        OPERATE,
    ),
    "upgrade": Entry(
        "clusters:upgrade",
        "Bring shardids' own objects to this version: the catalog, the nodes, then the shards.",
        OPERATE,
    ),
    "transactions": Entry(
        "tables.transactions:transactions",
        "List, or end, transactions that dead clients left prepared on the nodes, and their decisions.",
        OPERATE,
    ),
    "restore-point": Entry(
        "tables.transactions:restore_point",
        "Mark a moment on all servers, so that they can be restored to it together.",
        OPERATE,
    ),
    "adopt": Entry("adopt:app", "Take an existing PostgreSQL database into shards.", ADOPT),
    "key": Entry("keys:app", "Let keys of existing tables draw from a shard, where they are.", ADOPT),
    "id": Entry("ids:app", "Take IDs apart, put them together, draw them.", LOOK),
    "sql": Entry(
        "learn:sql",
        "List the SQL files that shardids installs, or print one, exactly as shardids runs it.",
        LOOK,
    ),
    "demo": Entry(
        "learn:demo",
        "Run two servers with 64 shards, write 6,000 rows through SQLAlchemy, and show what their IDs say.",
        LEARN,
    ),
    "dev": Entry("learn:app", "A cluster of embedded servers in a folder, to play with.", LEARN),
    "plan": Entry(
        "plan:plan",
        "Plan widths, shards and nodes for a load, or say with --layout whether one fits it. Asks no server.",
        LEARN,
    ),
    "compare": Entry(
        "compare:compare",
        "Measure all key schemes side by side, on servers of this machine that are started for it.",
        LEARN,
    ),
    "multimaster": Entry(
        "compare:multimaster",
        "Give every master of a group its own auto-increment offset: k masters, each counting by k.",
        LEARN,
    ),
}
"""Commands and groups of commands, in the order of ``--help``, by who needs them."""


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
            help="Log steps and changes of state to stderr; -vv: also statements.",
        ),
    ] = 0,
    log_format: Annotated[LogFormat, typer.Option(help="How records are written.")] = "text",
) -> None:
    from shardids.cli.logs import set_up

    set_up(verbose, as_json=log_format == "json")
