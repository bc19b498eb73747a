"""``shardids demo``, ``dev`` and ``sql``."""

from __future__ import annotations

import shlex
import signal
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, refuse, takes
from shardids.cli.ids import bit_picture
from shardids.cli.printing import bars, err, out, print_json
from shardids.errors import ShardidsError
from shardids.pg.notation import counted

if TYPE_CHECKING:
    from shardids.testing.demo import Demo, ShardRows

app = typer.Typer(help="A cluster of embedded servers in a folder, to play with.", no_args_is_help=True)

FolderOption = Annotated[Path, typer.Option("--dir", help="The cluster's folder.")]
_FOLDER = Path(".shardids")


@app.command()
@takes("dry-run")
def up(
    run: Run,
    folder: FolderOption = _FOLDER,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of servers: 2, or as many as the folder has.", show_default=False),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Number of logical shards: 64, or as many as there are.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the first server, the others follow; else free ones.", show_default=False),
    ] = None,
) -> None:
    """Create or start the cluster. It runs until: shardids dev down"""

    from shardids.testing import devcluster

    if run.dry:
        count = devcluster.checked_count(folder, nodes, shards, port=port)
        there = devcluster.servers_in(folder)
        for name, server in there.items():
            out.print(f'Node "{name}" {"runs" if server.is_running else "would be started"}')
        if not there:
            wanted = devcluster.SHARDS if shards is None else shards
            made = f"{counted(count, 'server')} with {counted(wanted, 'shard')}"
            out.print(f"Would make {made} in {folder}")
        return
    with bars("{task.description}", "bar", "count") as progress:
        task = progress.add_task("starting servers", total=None)
        servers = devcluster.up(
            folder,
            nodes,
            shards,
            port=port,
            on_progress=lambda done, total: progress.update(
                task, description="making shards", completed=done, total=total
            ),
        )
    for name, server in servers.items():
        out.print(f'node "{name}"  {server.url()}')
    out.print("\nThe catalog is on the first. For the other commands:")
    out.print(f"export SHARDIDS_CATALOG='{servers['a'].url()}'")


@app.command()
@takes("json")
def status(run: Run, folder: FolderOption = _FOLDER) -> None:
    """Show which of the folder's servers are running, and their URLs; exits 3 if any is not."""
    from shardids.testing import devcluster

    rows = [
        {"node": name, "running": "yes" if server.is_running else "no", "url": server.url()}
        for name, server in devcluster.servers_in(folder).items()
    ]
    where = "" if folder == _FOLDER else f" --dir {shlex.quote(str(folder))}"
    run.print_rows(rows, empty=f"No cluster in {folder}. To make one: shardids dev up{where}")
    if not rows or any(row["running"] == "no" for row in rows):
        raise typer.Exit(3)


@app.command()
@takes("dry-run", "yes")
def down(
    run: Run,
    folder: FolderOption = _FOLDER,
    remove: Annotated[bool, typer.Option("--remove", help="Also delete the data.")] = False,
) -> None:
    """Stop the servers; their data stays unless --remove. Exits 1 if there are none."""
    from shardids.testing import devcluster

    if remove and not run.dry and (there := devcluster.servers_in(folder)):
        run.ask(f"Delete the data of nodes {', '.join(there)} in {folder}?")
    names = list(devcluster.servers_in(folder)) if run.dry else devcluster.down(folder, remove=remove)
    if not names:
        err.print(f"No cluster in {folder}.")
        raise typer.Exit(1)
    done = "Removed" if remove else "Stopped"
    if run.dry:
        done = "Would remove" if remove else "Would stop"
    for name in names:
        out.print(f'{done} node "{name}"')


def demo() -> None:
    """Run two servers with 64 shards, write 6,000 rows through SQLAlchemy, and show what their IDs say."""
    from shardids.testing.demo import SHARDS, running

    started = time.monotonic()
    # SIGTERM acts like Ctrl-C, so that the servers are stopped properly.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with err.status("starting two PostgreSQL servers") as status, running() as demo:
            status.update(f"making {SHARDS} shards")
            demo.provision()
            status.stop()
            _heading(f"Two PostgreSQL {demo.server_version()} servers, {SHARDS} logical shards")
            _write(demo)
            _show_rows(demo.rows())
            samples = demo.sample_ids()
            _show_ids(demo, samples)
            _show_range(demo, samples[-1])
            _show_proof(demo)
    except KeyboardInterrupt:
        err.print("\nInterrupted: both servers are stopped, nothing is left behind.")
        raise typer.Exit(1) from None
    out.print(
        f"\nDone in {time.monotonic() - started:.1f} s; both servers are stopped, nothing is left behind."
    )


def _heading(words: str) -> None:
    out.print()
    out.print(words, style="bold")


def _write(demo: Demo) -> None:

    from shardids.testing.demo import PHOTOS_EACH, USERS

    rows = USERS * (1 + PHOTOS_EACH)
    started = time.monotonic()
    with bars("writing rows", "bar", "count") as progress:
        task = progress.add_task("", total=rows)
        for written in demo.write():
            progress.advance(task, written)
    seconds = time.monotonic() - started
    out.print(
        f"{USERS:,} users and {USERS * PHOTOS_EACH:,} photos written through SQLAlchemy sessions"
        f" in {seconds:.1f} s.\nA photo lives in its user's shard; every ID came from"
        " that shard's next_id()."
    )


def _show_rows(rows: list[ShardRows]) -> None:
    from rich.table import Table
    from rich.text import Text

    _heading("Rows per node and shard (shard: users + photos)")
    for node, members in groupby(rows, key=lambda row: row.node):
        shards = list(members)
        users, photos = sum(s.users for s in shards), sum(s.photos for s in shards)
        out.print(f'node "{node}": {len(shards)} shards, {users} users, {photos} photos')
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
        cells = [Text.assemble((f"{s.shard:4d}", "magenta"), f": {s.users}+{s.photos}") for s in shards]
        for start in range(0, len(cells), 6):
            table.add_row(*cells[start : start + 6])
        out.print(table)


def _show_ids(demo: Demo, ids: list[int]) -> None:
    _heading("Three IDs: two users and a photo")
    for number, id_ in enumerate(ids):
        if number:
            out.print()
        decoded = demo.cluster.decode(id_)
        node = demo.cluster.node_of(decoded.shard).name
        out.print(bit_picture(decoded, demo.cluster.layout, f'on node "{node}" now'))


def _show_range(demo: Demo, photo_id: int) -> None:
    shard, start, end, count = demo.time_range(photo_id)
    bounds = demo.cluster.layout.id_range(start, end, shard)
    _heading("A time range needs no date column: the primary key has it")
    out.print(f"photos of shard {shard} from {start:%H:%M:%S.%f} to {end:%H:%M:%S.%f} UTC: {count}")
    out.print(
        f"  ... FROM {demo.cluster.schema_of(shard)}.photos"
        f" WHERE id BETWEEN {bounds.first} AND {bounds.last}",
        style="dim",
    )


def _show_proof(demo: Demo) -> None:
    proof = demo.prove()
    _heading("Proof")
    for holds, words in (
        (proof.ids == proof.distinct, f"{proof.ids:,} IDs, {proof.distinct:,} of them distinct"),
        (not proof.disordered, f"{proof.disordered} out of order within their shard"),
        (not proof.born_elsewhere, f"{proof.born_elsewhere} that name another shard than their own"),
    ):
        out.print("[green]✓[/] " if holds else "[red]✗[/] ", markup=True, end="")
        out.print(words)
    if not proof.holds:
        raise ShardidsError("the demo found wrong IDs")


@takes("json")
def sql(
    run: Run,
    name: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Print it; for example: engine/engine.v1")
    ] = None,
) -> None:
    """List the SQL files that shardids installs, or print one, exactly as shardids runs it."""
    from shardids.pg.sqlfiles import read_sql, sql_names

    if name is not None:
        refuse("to one file", json=run.as_json)
        typer.echo(read_sql(name), nl=False)
    elif run.as_json:
        print_json(list(sql_names()))
    else:
        for one in sql_names():
            typer.echo(one)
