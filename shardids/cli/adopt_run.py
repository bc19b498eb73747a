"""``shardids adopt run``, ``status``, ``compare``, ``pause``, ``resume``, ``abort`` and ``switch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from shardids.adopt import adoption, events
from shardids.adopt.plan_file import read_plan
from shardids.catalog.connections import shown_url
from shardids.catalog.notation import parse_duration_ms
from shardids.catalog.rows import Catalog
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, opened, print_json
from shardids.cli.output import err, out
from shardids.errors import BadArgument

SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        envvar="SHARDIDS_SOURCE",
        metavar="URL",
        help="The source, if it is not reached as the plan says, or needs a password. It is not stored.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
MaxPauseOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long one attempt may stop writes: 500ms, 2s.")
]


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What shardids adopt plan has written.")],
    catalog: CatalogOption,
    source: SourceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy all rows into the shards, compare them, and let the nodes follow the source.

    Applications go on using the source. Everything is checked before anything is made.
    """
    wanted = read_plan(plan)
    with opened(catalog) as there:
        if dry_run:
            found = adoption.check(there, wanted, source=source)
            if as_json:
                print_json(asdict(found))
                return
            out.print(
                f"{found.split} tables would be split into {found.shards} shards on {found.nodes} nodes,"
                f" {found.reference} go to every node, {found.loose} stay at the source;"
                f" about {found.rows:,} rows, {decimal(found.size_bytes)}"
            )
            out.print("No obstacles found; nothing was changed")
            return
        with _shown() as show:
            done = adoption.run(there, wanted, source=source, on_event=show)
    _print(done, as_json=as_json)


def resume(
    catalog: CatalogOption,
    source: SourceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with an adoption that was paused or interrupted, from the step that it was at."""
    if dry_run:
        status(catalog, source, as_json)
        return
    with opened(catalog) as there, _shown() as show:
        done = adoption.resume(there, source=source, on_event=show)
    _print(done, as_json=as_json)


def pause(
    catalog: CatalogOption,
    source: SourceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop the nodes from following the source, until "adopt resume".

    The source keeps its log for them meanwhile: look at the room on its disk.
    """
    if dry_run:
        status(catalog, source, as_json)
        return
    with opened(catalog) as there:
        done = adoption.pause(there, source=source)
    _print(done, as_json=as_json)


def compare(catalog: CatalogOption, source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Compare every row of the source with those of the shards, while applications write."""
    with opened(catalog) as there, _shown() as show:
        done = adoption.compare(there, source=source, on_event=show)
    _print(done, as_json=as_json)


def abort(
    catalog: CatalogOption,
    source: SourceOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Undo an adoption: leave the source as it was, and empty the shards of the rows that were copied."""
    if dry_run:
        status(catalog, source, as_json)
        return
    if not yes:
        typer.confirm("Remove the rows that were copied into the shards?", abort=True, err=True)
    with opened(catalog) as there, _shown() as show:
        done = adoption.abort(there, source=source, on_event=show)
    _print(done, as_json=as_json)


def switch(
    catalog: CatalogOption,
    source: SourceOption = None,
    max_pause: MaxPauseOption = "2s",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop writes at the source and let the shards take them. There is no way back.

    Applications that still use the source get an error when they write, from the first moment on.
    """
    milliseconds = parse_duration_ms(max_pause)
    if not 50 <= milliseconds <= 600_000:
        raise BadArgument(f"{max_pause!r} is not between 50ms and 10min", hint="For example: 500ms or 2s")
    if dry_run:
        status(catalog, source, as_json)
        return
    if not yes:
        typer.confirm("Stop writes at the source for good?", abort=True, err=True)
    with opened(catalog) as there:
        with _shown() as show:
            done = adoption.switch(there, source=source, max_pause_s=milliseconds / 1000, on_event=show)
        _print(done, as_json=as_json)
        if not as_json:
            _print_changes(there)


def status(catalog: CatalogOption, source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Show how far the adoption is: its step, and how far each node is behind the source."""
    with opened(catalog) as there:
        found = adoption.status(there, source=source)
    if found is None:
        if as_json:
            print_json(None)
        else:
            err.print("No adoption is under way")
        return
    its = found.adoption
    row = {
        "source": its.source,
        "step": its.step,
        "paused": its.is_paused,
        "started": its.started_at.isoformat(timespec="seconds"),
        "compared": its.compared_at and its.compared_at.isoformat(timespec="seconds"),
        "switched": its.switched_at and its.switched_at.isoformat(timespec="seconds"),
        "source_takes_writes": not found.is_source_closed,
        "lag_bytes": found.lag_bytes,
    }
    if as_json:
        print_json(row)
        return
    for name, value in row.items():
        if name != "lag_bytes":
            out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    for node, lag in found.lag_bytes.items():
        behind = "does not follow" if lag is None else f"{decimal(lag)} behind"
        out.print(f"node {node}: {behind}", markup=False)


def _print(done: events.Result, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    paused = "" if done.pause_ms is None else f"; no writes were taken for {done.pause_ms:.0f} ms"
    out.print(f"{done.outcome or f'at step {done.step}'} after {done.seconds:.1f} s{paused}")
    if done.outcome is None and done.step == "follow":
        err.print("When applications are ready for the cluster: shardids adopt switch")


def _print_changes(there: Catalog) -> None:
    """Prints what applications have to change."""
    out.print("The shards have taken over. Applications now:")
    for line in (
        f"connect by the catalog: Cluster.connect({shown_url(there.url)!r})",
        "open sessions by the key: cluster.session(key=KEY), or by an ID: cluster.session(id=ID, of=Table)",
        "leave new IDs to the default of the column: next_id() of the shard",
    ):
        out.print(f"- {line}", markup=False)
    out.print("The source's tables refuse writes. Drop the old database when nobody reads it any more.")


@contextmanager
def _shown() -> Iterator[events.OnEvent]:
    """Shows an adoption in progress: by a bar on a terminal, otherwise by a line for each step."""
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(event: events.Event) -> None:
            line, total, completed = _told(event)
            if not err.is_terminal:
                if isinstance(event, events.StepBegun | events.Waiting | events.Compared):
                    err.print(line, markup=False)
                return
            progress.update(task, description=line, total=total, completed=completed)

        yield show


def _told(event: events.Event) -> tuple[str, float | None, float]:
    """Returns a text for an event, with the total and the completed part of its bar."""
    match event:
        case events.StepBegun() | events.StepDone():
            return event.step, None, 0
        case events.Copying():
            return (
                f"copy · {event.rows_done:,} of about {event.rows_total:,} rows · {event.tables_left} to do",
                event.rows_total,
                event.rows_done,
            )
        case events.Lagging():
            return f"follow · {decimal(event.lag_bytes)} behind", None, 0
        case events.Waiting():
            return f"put off ({event.attempt}): {event.reason}", None, 0
        case events.Compared():
            return f"compare · {event.table}: {event.rows:,} rows are the same", None, 0


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "status": status,
    "compare": compare,
    "pause": pause,
    "resume": resume,
    "abort": abort,
    "switch": switch,
}
"""The functions by the names of their commands, in the order of ``--help``."""
