"""``shardids routes`` and ``cdc``; on Citus also ``shard move`` and ``rebalance``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.copies import print_left
from shardids.cli.printing import err, out, print_error, print_json
from shardids.errors import BadArgument, ShardidsError
from shardids.pg.notation import parse_shards

if TYPE_CHECKING:
    from shardids.beside.capture import Capture
    from shardids.beside.citus.workers import Transfer
    from shardids.catalog.rows import Catalog

_LISTEN = "127.0.0.1:20000"
_DATABASE = "shardids"


@takes("catalog")
def routes(
    run: Run,
    form: Annotated[
        Literal["pgbouncer", "pgdog", "haproxy"],
        typer.Option("--format", help="The pooler or proxy that reads the file."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write this file instead, in one step."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and write the file again at each change of the placement.")
    ] = False,
    command: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="Run this in a shell once the file is there, and after each change: a RELOAD.",
        ),
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of haproxy: the address of shard 0; others follow it.")
    ] = _LISTEN,
    database: Annotated[
        str, typer.Option(metavar="NAME", help="Of pgdog: the database that its clients connect to.")
    ] = _DATABASE,
) -> None:
    """Print the addresses of all shards, as PgBouncer, PgDog or HAProxy read them."""
    from shardids.beside.following import Follower, RoutesFile
    from shardids.beside.routes import FORMATS, Options, read_routes
    from shardids.watch.serving import Address

    if form != "haproxy":
        refuse(f"to {form}", listen=listen != _LISTEN)
    if form != "pgdog":
        refuse(f"to {form}", database=database != _DATABASE)
    if output is None:
        refuse("without --output FILE", watch=watch, run=command)
    at = Address.parse(listen)
    options = Options(host=at.host, first_port=at.port, database=database)

    def text() -> str:
        return FORMATS[form](read_routes(run.catalog), options)

    if output is None:
        typer.echo(text(), nl=False)
        return
    if not output.parent.is_dir():
        raise BadArgument(
            f"folder {output.parent} does not exist", hint="Create it, where the pooler can read it."
        )
    file = RoutesFile(output, text, command)
    if not watch:
        out.print(f"Wrote {output}" if file.write() else f"{output} is as it should be")
        return

    def show(error: ShardidsError | OSError) -> None:
        if isinstance(error, ShardidsError):
            print_error(error.message, error.hint)
        else:
            print_error(f"{error.filename or output}: {error.strerror}")

    Follower(run.catalog, file).run(lambda: err.print(f"Wrote {output}"), show)


cdc = typer.Typer(
    help="Change capture: the changes of all shards, as logical replication streams them.",
    no_args_is_help=True,
)


@cdc.command("create")
@takes("catalog", "dry-run")
def create(run: Run) -> None:
    """Make a publication and a slot per node, and print the configuration of Debezium's connectors."""
    from shardids.beside import capture

    for one in capture.create(run.catalog, dry_run=run.dry):
        if one.published and one.there:
            err.print(f'Node "{one.node}" has both already')
        else:
            err.print(f'{"Would create" if run.dry else "Created"} slot {one.slot} on node "{one.node}"')
    print_json(capture.connectors(run.catalog))


@cdc.command("status")
@takes("catalog", "json")
def status(run: Run) -> None:
    """Show the slots, the log that they keep, and whether consumers leave out copies. Exits 3 on a fault."""
    from shardids.beside import capture

    found = capture.status(run.catalog)
    run.print_rows([_row(one) for one in found])
    for one in found:
        if one.fault:
            err.print(f"{one.fault}. {one.remedy}")
    if any(one.fault for one in found):
        raise typer.Exit(3)


def _row(one: Capture) -> dict[str, object]:
    return {
        "node": one.node,
        "slot": one.slot if one.there else None,
        "publication": one.published,
        "consumer": one.pid,
        "origin": one.origin,
        "kept_bytes": one.kept_bytes,
        "failover": one.failover,
    }


@cdc.command("drop")
@takes("catalog", "dry-run", "yes")
def drop(run: Run) -> None:
    """Drop the publications and slots. Consumers lose the changes that they have not read."""
    from shardids.beside import capture

    run.ask("Drop the slots of change capture? Consumers lose the changes that they have not read.")
    there = capture.drop(run.catalog, dry_run=run.dry)
    for one in there:
        out.print(f'{"Would drop" if run.dry else "Dropped"} slot {one.slot} on node "{one.node}"')
    if not there:
        out.print("There is nothing to drop")


def shown_workers(catalog: Catalog) -> dict[int, dict[str, object]]:
    """Return a column for the list of shards: the worker of Citus that holds each."""
    from shardids.beside.citus.workers import placed_on

    return {
        shard: {"worker": None if worker is None else str(worker)}
        for shard, worker in placed_on(catalog).items()
    }


def move_on_citus(
    run: Run, shards: Sequence[str] | None, to: str | None, on_busy: str, own: Mapping[str, object]
) -> None:
    """Move shards to a worker of Citus; ``own`` are options of moves that shardids itself makes."""
    from shardids.beside.citus.workers import Worker, plan_move

    refuse("to a cluster on Citus, which moves shards itself", **own)
    if not shards or to is None:
        raise BadArgument(
            "which shards, and where?", hint="For example: shardids shard move 5 --to worker2:5432"
        )
    there = run.catalog
    numbers = parse_shards(",".join(shards), there.shard_total())
    _carry_out(run, plan_move(there, numbers, Worker.parse(to)), on_busy)


def rebalance_on_citus(run: Run, on_busy: str, own: Mapping[str, object]) -> None:
    """Make the moves that Citus plans; ``own`` are options of plans that shardids itself makes."""
    from shardids.beside.citus.workers import plan_rebalance

    refuse("to a cluster on Citus, which plans the moves itself", **own)
    _carry_out(run, plan_rebalance(run.catalog), on_busy)


def _carry_out(run: Run, planned: Sequence[Transfer], on_busy: str) -> None:
    from shardids.beside.citus.workers import move
    from shardids.catalog.leases import OnBusy

    if run.dry:
        run.print_rows([one.row() for one in planned], empty="Nothing to move")
        return
    done, left = move(
        run.catalog,
        planned,
        on_busy=OnBusy(on_busy),
        on_begin=lambda one: err.print(f"shard {one.shard}: from {one.source} to {one.target}"),
        on_wait=lambda _attempt, lease: err.print(f"waits for {lease}"),
    )
    run.print_rows([one.row() for one in done], empty="Nothing to move")
    print_left(left)
