"""The command ``shardids``: parses, calls, prints; nothing else."""

from typing import Annotated

import typer

import shardids
from shardids.cli import baseline, clusters, compare, dev, doctor, ids, migrate, moves, sql, upgrade, views
from shardids.cli.common import ErrorsAsMessages

app = typer.Typer(
    name="shardids",
    cls=ErrorsAsMessages,
    help="64-bit IDs born inside PostgreSQL shards, and the cluster around them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback is for developers: plain, and without the values of variables.
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
) -> None:
    pass


app.command("init")(clusters.init)
app.command("grant")(clusters.grant)
app.command("upgrade")(upgrade.upgrade)
app.command("doctor")(doctor.examine)
clusters.shard_app.command("move")(moves.move_shards)
clusters.shard_app.command("moves")(moves.list_moves)
clusters.shard_app.command("purge")(moves.purge_shards)
clusters.node_app.command("drain")(moves.drain_node)
app.command("rebalance")(moves.rebalance)
app.add_typer(clusters.node_app, name="node")
app.add_typer(clusters.shard_app, name="shard")
app.add_typer(migrate.app, name="migrate")
app.add_typer(views.app, name="view")
app.add_typer(ids.app, name="id")
app.add_typer(sql.app, name="sql")
app.add_typer(dev.app, name="dev")
app.add_typer(baseline.app, name="baseline")
app.command("compare")(compare.compare)
app.command("demo")(dev.demo)
